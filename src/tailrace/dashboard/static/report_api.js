// In a report there is no server: what the views ask for stands in the page itself, as far as the report keeps it.

export class Failed extends Error {}

const kept = JSON.parse(document.getElementById("kept").textContent);

/** What the page knows of the run itself. */
export const about = kept.about;

/** As the dashboard's: `ofRun("quick", "tokens", { kind: "step", step: 3, id, branch: 0, from: 0 })`. */
export async function ofRun(_run, part, { kind, step, id, branch, from }) {
  if (part === "tokens" && from > 0) return { texts: [] };
  const answer = kept.answers[[part, kind, step, branch ?? 0, id ?? ""].join(" ")];
  if (answer === undefined) throw new Failed("The report keeps no more of it: `tailrace ui` shows the run's folder.");
  const bytes = Uint8Array.from(atob(answer), (one) => one.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
