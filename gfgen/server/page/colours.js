// A colour for each job that runs: the same wherever the job is shown.

// Seven colours in three weaves. Each is at least 3:1 against the panel, and they stay apart for people who
// see no red, no green or no blue: least distance 0.117 (light), 0.121 (dark) in OKLab under simulated
// protanopia, deuteranopia and tritanopia.
const PLAIN = 7;
const WEAVES = ["", " striped", " lined"];
const NUM = PLAIN * WEAVES.length;

export class Colours {
  #byJob = new Map(); // colour by job, in the order in which they were given

  /** The colour of a job, or null when it has none yet. */
  of(jobId) {
    return this.#byJob.get(jobId) ?? null;
  }

  /** Give each of these jobs a colour, which it keeps for as long as it is among them. */
  share(jobIds) {
    const shown = new Set(jobIds);
    for (const id of [...this.#byJob.keys()]) {
      if (!shown.has(id) && this.#byJob.size > NUM) this.#byJob.delete(id);
    }
    for (const id of shown) if (!this.#byJob.has(id)) this.#byJob.set(id, this.#next(shown));
  }

  /** One that no job has; else one that no shown job has; else the one that was given first. */
  #next(shown) {
    const inUse = new Set(this.#byJob.values());
    const inSight = new Set([...this.#byJob].filter(([id]) => shown.has(id)).map(([, colour]) => colour));
    const all = [...Array(NUM).keys()];
    const place = all.find((colour) => !inUse.has(colour)) ?? all.find((colour) => !inSight.has(colour));
    if (place !== undefined) return place;
    const last = new Map([...this.#byJob.values()].map((colour, age) => [colour, age]));
    return [...last].reduce((oldest, each) => (each[1] < oldest[1] ? each : oldest))[0];
  }
}

/** Let an element show a job's colour. */
export function dye(element, colour) {
  const own = colour === null ? " none" : ` c${colour % PLAIN}${WEAVES[Math.floor(colour / PLAIN)]}`;
  element.className = `swatch${own}`;
}

/** The colours as a canvas needs them: read from the style sheet, which knows whether it is dark. */
export class Paints {
  constructor(context) {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    this.ink = get("--ink");
    this.faint = get("--faint");
    this.line = get("--line");
    this.panel = get("--panel");
    this.lane = get("--lane");
    this.bad = get("--bad");
    this.font = style.fontFamily;
    this.plain = Array.from({ length: PLAIN }, (_, place) => get(`--c${place}`));
    const woven = (draw) => this.plain.map((colour) => weave(context, colour, this.panel, draw));
    this.fills = [...this.plain, ...woven(stripes), ...woven(lines)];
  }

  edge(colour) {
    return this.plain[colour % PLAIN];
  }

  fill(colour) {
    return this.fills[colour];
  }

  /** Black or white, whichever is easier to read on it. */
  text(colour) {
    const [r, g, b] = [1, 3, 5].map((from) => parseInt(this.edge(colour).slice(from, from + 2), 16) / 255);
    const light = [r, g, b].map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.18 ? "#000" : "#fff";
  }
}

function weave(context, colour, ground, draw) {
  const tile = new OffscreenCanvas(10, 10);
  const brush = tile.getContext("2d");
  brush.fillStyle = colour;
  brush.fillRect(0, 0, 10, 10);
  [brush.strokeStyle, brush.fillStyle, brush.lineWidth] = [ground, ground, 2];
  draw(brush);
  return context.createPattern(tile, "repeat");
}

function stripes(brush) {
  for (const from of [-10, 0, 10]) {
    brush.beginPath();
    brush.moveTo(from - 2, 12);
    brush.lineTo(from + 12, -2);
    brush.stroke();
  }
}

function lines(brush) {
  for (const y of [1, 6]) brush.fillRect(0, y, 10, 1.5);
}
