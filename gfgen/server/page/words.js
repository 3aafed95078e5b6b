// Texts and elements for all parts of the page. Text from others is never inserted as HTML.

export const byId = (id) => document.getElementById(id);

/** A new element; `values` are properties (`class` and `data` too), the rest its content. */
export function make(name, values = {}, ...content) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(values)) {
    if (key === "class") element.className = value;
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key.startsWith("aria-") || key === "role") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...content);
  return element;
}

/** Set a text if it differs, to avoid needless drawing, lost selections and announcements. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute if it differs; null removes it. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Put these children in this order with few moves, because a moved element loses the focus. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let place = parent.firstElementChild;
  for (const child of children) {
    if (child === place) place = place.nextElementSibling;
    else {
      const hadFocus = child.contains(document.activeElement) ? document.activeElement : null;
      parent.insertBefore(child, place);
      hadFocus?.focus({ preventScroll: true });
    }
  }
}

/** "0.4 s", "12 s", "3 min 20 s", "2 h 5 min", "3 d 4 h". */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s < 0.05 ? 0 : s.toFixed(1)} s`;
  if (s < 99.5) return `${Math.round(s)} s`;
  const [big, small, unit, part] =
    s < 7170 ? [60, 1, "min", "s"] : s < 172800 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
  const parts = Math.round(s / small);
  const rest = parts % (big / small);
  return `${Math.floor(parts / (big / small))} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

/** A countdown: whole seconds, so that it does not flicker. */
export const countdown = (seconds) => duration(Math.max(1, Math.round(seconds))).replace(".0", "");

/** The time of day, short, for the axis. */
export function hour(at) {
  const time = new Date(at * 1000);
  const parts = [time.getHours(), time.getMinutes(), time.getSeconds()];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

/** The time of day, with the date if it is not today. */
export function clock(at, now) {
  const day = new Date(at * 1000);
  const time = day.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const isToday = day.toDateString() === new Date(now * 1000).toDateString();
  return isToday ? time : `${day.toLocaleDateString([], { month: "short", day: "numeric" })}, ${time}`;
}

export const sized = (size) => size.replace("x", "\u00d7");

export function bytesOf(size) {
  const units = ["B", "kB", "MB", "GB"];
  let place = 0;
  while (size >= 1000 && place < 3) [size, place] = [size / 1000, place + 1];
  return `${place && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[place]}`;
}

/** Text with a capital letter and a full stop. */
export const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

export function ordinal(number) {
  const last = number % 100 > 10 && number % 100 < 14 ? 0 : number % 10;
  return `${number}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}

/** "rank 2", "ranks 0 to 3", "ranks 0, 2". */
export function ranksOf(layout) {
  const ranks = [...layout.ranks].sort((a, b) => a - b);
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  const isRow = ranks.length > 2 && ranks.at(-1) - ranks[0] === ranks.length - 1;
  return `ranks ${isRow ? `${ranks[0]} to ${ranks.at(-1)}` : ranks.join(", ")}`;
}

/** How the ranks share a step: "cfg 2 x ulysses 2". */
export function sharing(layout) {
  const degrees = ["cfg", "ulysses", "torus", "ring"].filter((name) => layout[name] > 1);
  return degrees.map((name) => `${name} ${layout[name]}`).join(" \u00d7 ");
}

const STAGES = {
  encode: "encoding",
  prepare: "preparing",
  denoise: "denoising",
  reuse: "reusing",
  decode: "decoding",
  write: "writing",
};

/** "1 rank", "4 ranks". */
export function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** The current work: "step 5 of 25", "decoding". */
export function doing(stage, step, steps) {
  return ["denoise", "reuse", "refine"].includes(stage) && steps ? `step ${step + 1} of ${steps}` : STAGES[stage] ?? "";
}

/** A job's settings on one line. */
export function facts(job) {
  const parts = [job.model, sized(job.size)];
  if ((job.frames ?? 1) > 1) parts.push(`${job.frames} frames`);
  parts.push(counted(job.steps, "step"));
  if (job.priority && job.status !== "queued") parts.push(`priority ${job.priority}`);
  if (job.tag) parts.push(job.tag);
  parts.push(...(job.warnings ?? []).map((text) => `\u26a0 ${text}`));
  return parts.join(" \u00b7 ");
}

/** Announce a text to screen readers. */
export function say(text) {
  byId("said").textContent = "";
  setTimeout(() => (byId("said").textContent = text), 50);
}

export const stillness = matchMedia("(prefers-reduced-motion: reduce)");
