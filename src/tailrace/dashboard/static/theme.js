// Before anything is painted: the colours that were chosen last, else the system's.
"use strict";
const chosen = localStorage.getItem("tailrace-theme");
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
