// Results: the newest one large, and a gallery of all that has only the visible tiles in the document.

import { at } from "./live.js";
import { Lightbox, picture } from "./lightbox.js";
import { arrange, byId, facts, make, mark, say, write } from "./words.js";

const GAP = 8;
const SIDES = { wide: 164, phone: 104 }; // least sides of tiles
const SPARE = 2; // rows above and below the visible ones
const MOST_CHOSEN = 100; // files in one archive

export class Gallery {
  #live;
  #acts;
  #lightbox;
  #kind = "all";
  #list = [];
  #tiles = new Map();
  #places = new Map(); // of jobs in the list
  #activeId = null; // the tile that the keyboard reaches
  #chosen = new Set();
  #stage = "";
  #grid = { columns: 1, side: 100 };
  #isLoading = false;
  #isDue = false;

  constructor({ live, acts }) {
    [this.#live, this.#acts] = [live, acts];
    this.#lightbox = new Lightbox({ live, acts, closed: (id) => this.#closed(id) });
    byId("results-more").addEventListener("click", () => this.#more());
    byId("filter").addEventListener("change", (event) => {
      this.#kind = event.target.value;
      byId("results-scroll").scrollTop = 0;
      this.show();
    });
    byId("chosen-none").addEventListener("click", () => {
      this.#chosen.clear();
      this.show();
      byId("results-title").focus({ preventScroll: true });
    });
    byId("chosen-compare").addEventListener("click", () => {
      const [beside, id] = this.#chosen;
      this.#lightbox.open(id, { jobs: () => this.#list, beside });
    });
    byId("results").addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("scroll", () => this.#soon(), { passive: true, capture: true });
    new ResizeObserver(() => this.#soon()).observe(byId("results-scroll"));
  }

  show() {
    this.#list = this.#live.shown(this.#kind);
    this.#places = new Map(this.#list.map((job, place) => [job.id, place]));
    for (const id of this.#chosen) if (!this.#live.job(id)) this.#chosen.delete(id);
    this.#showStage();
    this.#showCount();
    this.#showChosen();
    this.#render();
    this.#lightbox.refresh();
  }

  #showCount() {
    const count = (status) => this.#list.filter((job) => job.status === status).length;
    const [cancelled, hasOlder] = [count("cancelled"), this.#live.hasOlder[this.#kind]];
    const parts = [`${count("completed").toLocaleString()} completed`, `${count("failed")} failed`];
    if (cancelled) parts.push(`${cancelled} cancelled`);
    if (hasOlder) parts.push("more below");
    const isEmpty = this.#list.length === 0;
    write(byId("results-count"), isEmpty ? "" : parts.join(", "));
    const isAll = this.#kind === "all";
    write(byId("results-empty"), isAll ? "Images and videos appear here. Describe one under New job." : "No favourites. Mark results with \u2606.");
    byId("results-empty").hidden = !isEmpty || hasOlder;
    byId("results-more").hidden = !hasOlder;
  }

  /** The newest picture or video, as large as the panel allows. */
  #showStage() {
    const job = this.#kind === "all" ? this.#list.find((each) => each.status === "completed") : null;
    byId("stage").hidden = !job;
    const isAlone = Boolean(job) && this.#list.length === 1;
    byId("results").hidden = isAlone;
    byId("stage").classList.toggle("alone", isAlone);
    if (!job) return this.#stage = "";
    const look = `${job.id} ${job.favourite}`;
    if (this.#stage === look) return;
    if (!this.#stage.startsWith(`${job.id} `)) {
      const open = make("button", { type: "button", class: "stage-open" });
      open.setAttribute("aria-label", labelOf(job));
      open.addEventListener("click", () => this.#open(job.id));
      const shown = picture(job);
      if (job.object === "video") byId("stage-show").replaceChildren(shown);
      else byId("stage-show").replaceChildren((open.append(shown), open));
      shown.addEventListener("error", () => shown.classList.add("broken"));
      write(byId("stage-prompt"), job.prompt);
      mark(byId("stage-prompt"), "title", job.prompt);
      write(byId("stage-facts"), `${facts(job)} \u00b7 seed ${job.seed}`);
    }
    this.#stage = look;
    const large = make("button", { type: "button" }, "Open");
    large.addEventListener("click", () => this.#open(job.id));
    const hadFocus = byId("stage-acts").contains(document.activeElement);
    byId("stage-acts").replaceChildren(...this.#acts.buttons(job), ...(job.object === "video" ? [large] : []));
    if (hadFocus) byId("stage-acts").firstChild.focus({ preventScroll: true });
  }

  #open(id) {
    this.#lightbox.open(id, { jobs: () => this.#list });
  }

  #closed(id) {
    if (document.activeElement !== document.body) return;
    if (!this.#focus(this.#places.get(id))) {
      (document.querySelector("#stage:not([hidden]) button") ?? byId("results-title")).focus({ preventScroll: true });
    }
  }

  // The visible tiles --------------------------------------------------------------------------------

  #soon() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.#render();
    });
  }

  #render() {
    const list = byId("results");
    const width = list.clientWidth;
    if (!width) return;
    const least = matchMedia("(max-width: 699px)").matches ? SIDES.phone : SIDES.wide;
    const columns = Math.max(2, Math.floor((width + GAP) / (least + GAP)));
    const side = (width - GAP * (columns - 1)) / columns;
    this.#grid = { columns, side };
    const row = side + GAP;
    const rows = Math.ceil(this.#list.length / columns);
    list.style.height = `${Math.max(0, rows * row - GAP)}px`;
    const { top, bottom } = this.#window();
    const [first, last] = [Math.floor(top / row) - SPARE, Math.ceil(bottom / row) + SPARE];
    const visible = this.#list.slice(Math.max(0, first * columns), Math.max(0, last * columns));
    if (!this.#places.has(this.#activeId)) this.#activeId = this.#list[0]?.id ?? null;
    const shown = new Set([...visible, ...this.#list.slice(this.#places.get(this.#activeId) ?? 0).slice(0, 1)]);
    const jobs = [...shown].sort((a, b) => this.#places.get(a.id) - this.#places.get(b.id));
    this.#put(jobs, row);
    if (this.#live.hasOlder[this.#kind] && last >= rows) this.#more();
  }

  /** The part of the list that can be seen, in pixels from its top. */
  #window() {
    const [list, scroll] = [byId("results").getBoundingClientRect(), byId("results-scroll").getBoundingClientRect()];
    const [from, to] = [Math.max(0, scroll.top), Math.min(innerHeight, scroll.bottom)];
    return { top: from - list.top, bottom: to - list.top };
  }

  #put(jobs, row) {
    const shown = new Set(jobs.map((job) => job.id));
    const focusedId = document.activeElement?.closest?.("#results .tile")?.dataset.id;
    for (const id of [...this.#tiles.keys()]) if (!shown.has(id)) this.#tiles.delete(id);
    for (const job of jobs) {
      if (!this.#tiles.has(job.id)) this.#tiles.set(job.id, this.#tile(job));
      const tile = this.#tiles.get(job.id);
      const place = this.#places.get(job.id);
      const [x, y] = [place % this.#grid.columns, Math.floor(place / this.#grid.columns)];
      tile.style.transform = `translate(${x * row}px, ${y * row}px)`;
      tile.style.width = tile.style.height = `${this.#grid.side}px`;
      mark(tile, "aria-posinset", place + 1);
      mark(tile, "aria-setsize", this.#list.length);
      tile.classList.toggle("favourite", Boolean(job.favourite));
      tile.firstChild.tabIndex = job.id === this.#activeId ? 0 : -1;
      const box = tile.querySelector(".choose");
      if (box) box.checked = this.#chosen.has(job.id);
    }
    arrange(byId("results"), jobs.map((job) => this.#tiles.get(job.id)));
    if (focusedId && !shown.has(focusedId)) byId("results-title").focus({ preventScroll: true });
  }

  async #more() {
    if (this.#isLoading) return;
    this.#isLoading = true;
    try {
      await this.#live.more(this.#kind);
    } catch (problem) {
      byId("results-more").title = problem.message;
      say(`No more results: ${problem.message}`);
      await new Promise((resolve) => setTimeout(resolve, 5000));
    }
    this.#isLoading = false;
  }

  #tile(job) {
    const button = make("button", { type: "button", class: "tile-button" });
    const isDone = job.status === "completed";
    if (isDone) {
      const [width, height] = job.size.split("x").map(Number);
      const image = make("img", { width, height, alt: "", loading: "lazy", decoding: "async" });
      image.src = at(job.thumbnail_url);
      image.addEventListener("error", () => image.classList.add("broken"));
      image.addEventListener("load", () => image.classList.remove("broken"));
      const again = () => (image.src = at(job.thumbnail_url));
      image.addEventListener("error", () => setTimeout(again, 3000), { once: true });
      button.append(image);
      const length = `\u25b6 ${Number(job.seconds ?? 0).toFixed(1)} s`;
      if (job.object === "video") button.append(make("span", { class: "badge" }, length));
    } else {
      const sign = job.status === "failed" ? "\u2717 " : "";
      button.append(make("span", { class: `end ${job.status}` }, `${sign}${job.status}`));
    }
    button.append(make("span", { class: "tile-prompt" }, job.prompt));
    button.append(make("span", { class: "star", "aria-hidden": "true" }, "\u2605"));
    mark(button, "aria-label", labelOf(job));
    button.addEventListener("click", () => this.#open(job.id));
    button.addEventListener("focus", () => (this.#activeId = job.id));
    const tile = make("li", { class: "tile", data: { id: job.id, status: job.status }, title: job.prompt }, button);
    if (isDone) {
      const box = make("input", { type: "checkbox", class: "choose", tabIndex: -1 });
      mark(box, "aria-label", `Choose ${job.prompt.slice(0, 80)}`);
      box.addEventListener("change", () => this.#choose(job));
      tile.append(box);
    }
    return tile;
  }

  // The keyboard, and what is chosen -----------------------------------------------------------------

  #key(event) {
    const place = this.#places.get(this.#activeId) ?? 0;
    const job = this.#list[place];
    const { columns } = this.#grid;
    const end = this.#list.length - 1;
    const moves = {
      ArrowRight: place + 1, ArrowLeft: place - 1, ArrowDown: Math.min(end, place + columns), ArrowUp: place - columns,
      Home: 0, End: end,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) this.#focus(moves[event.key]);
    else if (event.key === "x" && job?.status === "completed") this.#choose(job);
    else if (event.key === "f" && job?.status === "completed") this.#favour(job);
    else return;
    event.preventDefault();
  }

  async #favour(job) {
    try {
      await this.#acts.favour(job);
    } catch (problem) {
      say(problem.message);
    }
  }

  /** Move to the tile at this place; whether there is one. */
  #focus(place) {
    const job = this.#list[place];
    if (!job || byId("results").hidden) return false;
    this.#activeId = job.id;
    this.#render();
    const button = this.#tiles.get(job.id).firstChild;
    button.scrollIntoView({ block: "nearest" });
    button.focus({ preventScroll: true });
    return true;
  }

  #choose(job) {
    const [was, isFull] = [this.#chosen.delete(job.id), this.#chosen.size === MOST_CHOSEN];
    if (!was && !isFull) this.#chosen.add(job.id);
    const told = was ? "Not chosen" : isFull ? `At most ${MOST_CHOSEN} can be chosen, without` : "Chosen";
    say(`${told}: ${job.prompt}`);
    this.show();
  }

  #showChosen() {
    const num = this.#chosen.size;
    byId("chosen").hidden = num === 0;
    mark(byId("results"), "data-choosing", num ? "yes" : null);
    write(byId("chosen-count"), `${num} chosen`);
    byId("chosen-save").href = `v1/jobs/archive?ids=${[...this.#chosen].map(encodeURIComponent).join(",")}`;
    byId("chosen-compare").hidden = num !== 2;
  }
}

function labelOf(job) {
  const late = job.will_meet_deadline === false && job.status === "completed" ? ", late" : "";
  return `${job.prompt}, ${job.object}, ${job.status}${late}`;
}
