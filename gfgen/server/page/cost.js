// What a job will cost, from what earlier ones took: while one types, no server is asked.

const NEAREST = 5;

/** { each, ends } in seconds: of ranks for one job, and until the last of `number` jobs is there; else null. */
export function estimate(live, { model, size, frames, steps, number }) {
  const pixels = pixelsOf({ size, frames });
  if (!pixels || !Number(steps)) return null;
  const known = live.ended.filter((job) => job.status === "completed" && job.model === model && job.rank_s > 0);
  const bySize = Map.groupBy(known.filter((job) => pixelsOf(job) * job.steps), pixelsOf);
  if (!bySize.size) return null;
  const alike = (of) => bySize.get(of).toSorted((a, b) => apart(a.steps, steps) - apart(b.steps, steps)).slice(0, NEAREST);
  const stepS = (of) => middle(alike(of).map((job) => job.rank_s / job.steps));
  // A step takes as long as those of jobs with as many pixels, or a time between those with fewer and with more.
  const sizes = [...bySize.keys()].sort((a, b) => a - b);
  const below = sizes.findLast((each) => each <= pixels) ?? sizes[0];
  const above = sizes.find((each) => each >= pixels) ?? sizes.at(-1);
  const power = below === above ? 1 : Math.log(stepS(above) / stepS(below)) / Math.log(above / below);
  const each = Number(steps) * stepS(below) * (pixels / below) ** power;
  const near = alike(apart(below, pixels) <= apart(above, pixels) ? below : above);
  const shared = middle(near.map((job) => Math.max(1, job.rank_s / (job.inference_time_s || job.rank_s))));
  const ranks = live.state.ranks.filter((rank) => rank.status === "idle" || rank.status === "busy");
  const num = Math.max(1, ranks.length);
  const waitS = ranks.some((rank) => rank.status === "idle") ? 0 : queueS(live);
  return { each, ends: waitS + Math.max(each / Math.min(shared, num), (number * each) / num) };
}

function queueS(live) {
  const ends = [...live.open.values()].map((job) => job.predicted_completion_at ?? 0);
  return Math.max(0, Math.max(0, ...ends) - live.now());
}

function pixelsOf({ size, frames }) {
  const [width, height] = String(size).toLowerCase().split("x").map(Number);
  return width * height * (Number(frames) || 1) || 0;
}

const apart = (one, other) => Math.abs(Math.log(one / other));

/** Of two the smaller: a first job may have waited for its model. */
const middle = (values) => values.toSorted((a, b) => a - b)[(values.length - 1) >> 1];

/** Seconds of a text like "90s", "2m" or "1h30m"; null for others. */
export function seconds(text) {
  const units = { s: 1, m: 60, h: 3600, d: 86400 };
  if (/^\d+(\.\d+)?$/.test(text)) return Number(text);
  if (!/^(\d+(\.\d+)?[smhd])+$/.test(text)) return null;
  return [...text.matchAll(/(\d+(?:\.\d+)?)([smhd])/g)].reduce((sum, [, number, unit]) => sum + number * units[unit], 0);
}

/** The texts that `{a|b}` in a text stand for, as gfgen expands them; null if the braces are wrong. */
export function variations(text) {
  const pieces = text.split(/\{([^{}]*)\}/);
  if (pieces.some((piece, place) => place % 2 === 0 && /[{}]/.test(piece))) return null;
  const choices = pieces.map((piece, place) => {
    if (place % 2 === 0) return [piece];
    return piece.includes("|") ? piece.split("|") : [`{${piece}}`];
  });
  if (choices.reduce((product, each) => product * each.length, 1) > 10000) return null;
  return choices.reduce((texts, each) => texts.flatMap((text) => each.map((one) => text + one)), [""]);
}
