// A colour for each running job, the same in all parts of the page.

// Seven colours in three patterns, the same in light and dark. Each has a contrast of at least 3:1 against both panels.
// They stay distinct for people who cannot see red, green or blue: the least distance is 0.112 in OKLab under
// simulated protanopia, deuteranopia and tritanopia (tests/server/test_page_colours.py).
const PLAIN = 7;
const PATTERNS = ["", " striped", " lined"];
const NUM = PLAIN * PATTERNS.length;

export class Colours {
  #byJob = new Map(); // colour by job, in order of assignment

  /** The colour of a job, or null when it has none yet. */
  of(jobId) {
    return this.#byJob.get(jobId) ?? null;
  }

  /** Give each of these jobs a colour, which it keeps while it is shown. */
  share(jobIds) {
    const shown = new Set(jobIds);
    for (const id of [...this.#byJob.keys()]) {
      if (!shown.has(id) && this.#byJob.size > NUM) this.#byJob.delete(id);
    }
    for (const id of shown) if (!this.#byJob.has(id)) this.#byJob.set(id, this.#next(shown));
  }

  /** A colour that no job has; else one that no shown job has; else the one assigned first. */
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

/** Give an element a job's colour. */
export function dye(element, colour) {
  const own = colour === null ? " none" : ` c${colour % PLAIN}${PATTERNS[Math.floor(colour / PLAIN)]}`;
  element.className = `swatch${own}`;
}

/** The colours for a canvas, read from the style sheet, which depends on the colour scheme. */
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
    const patterned = (draw) => this.plain.map((colour) => pattern(context, colour, this.panel, draw));
    this.fills = [...this.plain, ...patterned(stripes), ...patterned(lines)];
  }

  edge(colour) {
    return this.plain[colour % PLAIN];
  }

  fill(colour) {
    return this.fills[colour];
  }

  /** Black or white, whichever has more contrast. */
  text(colour) {
    const [r, g, b] = [1, 3, 5].map((from) => parseInt(this.edge(colour).slice(from, from + 2), 16) / 255);
    const light = [r, g, b].map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.18 ? "#000" : "#fff";
  }
}

function pattern(context, colour, ground, draw) {
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
