// Where one is, in the address behind `#`: every view can be linked to, and Back works.

/** `#/run/quick/groups?step=3` → { run: "quick", view: "groups", parameters: { step: "3" } }. */
export function here() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [kind, run, view] = path.split("/").map(decode);
  return { run: kind === "run" ? run : undefined, view: kind === "run" ? view || "curves" : "runs", parameters: Object.fromEntries(new URLSearchParams(search ?? "")) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The address of a view; parameters without a value are left out. */
export function to(run, view, parameters) {
  const given = Object.entries(parameters ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return run === undefined ? `#/${search}` : `#/run/${encodeURIComponent(run)}/${view}${search}`;
}

export function go(run, view, parameters) {
  location.hash = to(run, view, parameters);
}

/** The same place with other parameters, without a step in the history. */
export function amend(parameters) {
  const place = here();
  history.replaceState(null, "", to(place.run, place.view, { ...place.parameters, ...parameters }));
}
