// What the server is asked for. One address serves all; a run and its parts are named in the query.

export class Failed extends Error {}

async function ask(path, options) {
  let response, text, body;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed("the server does not answer: has `tailrace ui` ended, or the run that the page was beside?");
  }
  try {
    body = JSON.parse(text);
  } catch {
    throw new Failed(text.trim() || `status ${response.status}`);
  }
  if (!response.ok) throw new Failed(body.error ?? `status ${response.status}`);
  return body;
}

function query(parameters) {
  const given = Object.entries(parameters ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

export const getRuns = (signal) => ask("api/runs", { signal });

/** Of one run: `ofRun("quick", "rollouts", { step: 3 })`; without a part, the run itself. */
export const ofRun = (run, part, parameters, signal) =>
  ask(`api/runs/${encodeURIComponent(run)}${part ? `/${part}` : ""}${query(parameters)}`, { signal });

/** What one that answers says to a conversation: `name` is one of the run's `chats`. */
export const say = (run, name, messages, settings) =>
  ask(`api/runs/${encodeURIComponent(run)}/chat${query({ with: name })}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ messages, ...settings }) });

/** Calls again and again while the page is seen and `alive` (an AbortSignal) lasts; nothing asks while nobody looks. */
export function every(seconds, alive, call) {
  let timer = 0, busy = false;
  const tick = async () => {
    clearTimeout(timer);
    if (alive.aborted || busy || document.hidden) return;
    busy = true;
    try {
      await call();
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof Failed)) throw error;
    } finally {
      busy = false;
      if (!alive.aborted && !document.hidden) timer = setTimeout(tick, seconds * 1000);
    }
  };
  const seen = () => { if (!document.hidden) tick(); };
  document.addEventListener("visibilitychange", seen);
  alive.addEventListener("abort", () => { clearTimeout(timer); document.removeEventListener("visibilitychange", seen); });
  timer = setTimeout(tick, seconds * 1000);
}
