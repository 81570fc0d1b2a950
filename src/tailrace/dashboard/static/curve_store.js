// A run's metrics as columns, kept up to date: only what was appended is asked for.
import { ofRun } from "./api.js";

export class CurveStore {
  constructor(run, names) {
    this.run = run;
    this.names = [...names];
    this.clear();
  }

  clear() {
    this.columns = {};
    this.count = 0;
    this.generation = undefined;
    this.all = [];
  }

  /** Also this metric or pattern; what is there already is asked for again, once. */
  add(name) {
    if (!this.names.includes(name)) {
      this.names.push(name);
      this.clear();
    }
  }

  /** Whether there is anything new. */
  async update(signal) {
    const found = await ofRun(this.run, "curves", { names: this.names.join(","), after: this.count, generation: this.generation, all: 1 }, signal);
    const isNew = found.generation !== this.generation || found.after === 0;
    const entries = Object.entries(found.columns);
    if (!isNew && found.count === this.count) return false;
    if (!isNew && entries.some(([name]) => !(name in this.columns))) {
      this.clear(); // one that came to be, or grew to be among the largest: it is asked for whole
      return this.update(signal);
    }
    this.columns = Object.fromEntries(entries.map(([name, values]) => [name, isNew ? values : this.columns[name].concat(values)]));
    Object.assign(this, { count: found.count, generation: found.generation, all: found.names });
    return true;
  }

  /** [count] of one metric. */
  values(name) {
    return this.columns[name] ?? [];
  }

  last(name) {
    const values = this.values(name);
    for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
    return null;
  }

  first(name) {
    return this.values(name).find((value) => value !== null) ?? null;
  }

  // Names that are there and fit a pattern with one star; a name without one stands for itself.
  matching(pattern) {
    if (!pattern.includes("*")) return pattern in this.columns ? [pattern] : [];
    const [head, tail] = pattern.split("*");
    return Object.keys(this.columns).filter((name) => name.startsWith(head) && name.endsWith(tail) && name.length > head.length + tail.length);
  }

  /** The axis: steps, seconds, or tokens sampled so far. */
  xs(kind) {
    if (kind === "wall") return this.values("wall_s");
    if (kind !== "tokens") return this.values("step");
    let sum = 0;
    return this.values("rollout/generated_tokens").map((value) => (sum += value ?? 0));
  }
}
