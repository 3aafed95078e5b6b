// The start image and its mask: chosen, dropped, pasted or painted.

import { byId, mark, say } from "./words.js";

export class Picture {
  file = null;
  #isPainted = false;
  #mask = byId("mask"); // as large as the image; what is opaque is painted
  #takes = { image: "no", mask: null };
  #changed;

  /** `changed` is called after a change, `wanted` when a picture comes for a model that takes none. */
  constructor({ changed, wanted }) {
    this.#changed = changed;
    const came = (file) => {
      if (this.#takes.image === "no" && !wanted()) return say("No model of this server takes a start image");
      this.take(file);
    };
    byId("image").addEventListener("change", (event) => event.target.files[0] && this.take(event.target.files[0]));
    byId("picture-remove").addEventListener("click", () => {
      this.clear();
      byId("image").focus();
    });
    byId("mask-open").addEventListener("click", () => byId("mask-dialog").showModal());
    byId("mask-done").addEventListener("click", () => byId("mask-dialog").close());
    byId("mask-dialog").addEventListener("close", () => this.#show());
    byId("mask-clear").addEventListener("click", () => this.#clearMask());
    byId("mask-file").addEventListener("change", (event) => {
      if (event.target.files[0]) this.takeMask(event.target.files[0]);
      event.target.value = "";
    });
    this.#listen(came);
    this.#paint();
  }

  /** What the chosen model takes. */
  fit({ takes_image: image, mask_argument: mask = null }) {
    this.#takes = { image, mask };
    byId("mask-open").hidden = !mask;
    byId("picture-mask").hidden = !mask;
  }

  get maskArgument() {
    return this.#isPainted ? this.#takes.mask : null;
  }

  /** Use this file, and forget the mask of the one before. */
  async take(file) {
    let picture;
    try {
      picture = await createImageBitmap(file);
    } catch {
      return this.#blame("This file is no picture that the browser can read.");
    }
    this.file = file;
    this.#isPainted = false;
    for (const id of ["picture-view", "mask-view"]) draw(byId(id), picture);
    [this.#mask.width, this.#mask.height] = [picture.width, picture.height];
    byId("mask-stack").style.setProperty("--ratio", picture.width / picture.height);
    this.#blame("");
    this.#show();
    say(`Start image: ${file.name}, ${picture.width} by ${picture.height}`);
  }

  clear() {
    [this.file, this.#isPainted] = [null, false];
    byId("image").value = "";
    this.#show();
  }

  /** A mask from a file: white or opaque where the model paints. */
  async takeMask(file) {
    const { width, height } = this.#mask;
    const brush = this.#mask.getContext("2d");
    brush.globalCompositeOperation = "copy";
    brush.drawImage(await createImageBitmap(file), 0, 0, width, height);
    brush.globalCompositeOperation = "source-over";
    const pixels = brush.getImageData(0, 0, width, height);
    const { data } = pixels;
    for (let at = 0; at < data.length; at += 4) {
      const light = (data[at] + data[at + 1] + data[at + 2]) / 3;
      data.set([255, 0, 170, (light * data[at + 3]) / 255], at);
    }
    brush.putImageData(pixels, 0, 0);
    this.#isPainted = true;
    this.#show();
  }

  /** The mask as a file: white where the model paints; null if there is none. */
  async maskFile() {
    if (!this.maskArgument) return null;
    const { width, height } = this.#mask;
    const sheet = new OffscreenCanvas(width, height);
    const brush = sheet.getContext("2d");
    brush.drawImage(this.#mask, 0, 0);
    brush.globalCompositeOperation = "source-in";
    brush.fillStyle = "#fff";
    brush.fillRect(0, 0, width, height);
    brush.globalCompositeOperation = "destination-over";
    brush.fillStyle = "#000";
    brush.fillRect(0, 0, width, height);
    return new File([await sheet.convertToBlob({ type: "image/png" })], "mask.png", { type: "image/png" });
  }

  #show() {
    const has = this.file !== null;
    byId("picture-shown").hidden = !has;
    byId("image").hidden = has;
    byId("image-tip").hidden = has;
    if (has) draw(byId("picture-mask"), this.#mask);
    byId("mask-open").textContent = this.#isPainted ? "Change the mask" : "Draw a mask";
    this.#changed();
  }

  #blame(text) {
    byId("image-wrong").textContent = text;
    mark(byId("image"), "aria-invalid", text ? "true" : null);
  }

  // Dropping, pasting and painting -------------------------------------------------------------------

  /** A picture that comes while the mask is open is a mask. */
  #listen(came) {
    const take = (files) => {
      const file = [...files].find((each) => each.type.startsWith("image/"));
      if (file) byId("mask-dialog").open ? this.takeMask(file) : came(file);
      return Boolean(file);
    };
    addEventListener("dragover", (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      document.body.dataset.drop = "yes";
    });
    addEventListener("dragleave", (event) => event.relatedTarget === null && delete document.body.dataset.drop);
    addEventListener("drop", (event) => {
      delete document.body.dataset.drop;
      if (event.target.type === "file" || !event.dataTransfer.files.length) return;
      event.preventDefault();
      if (!take(event.dataTransfer.files)) say("Only pictures can be dropped here");
    });
    addEventListener("paste", (event) => take(event.clipboardData?.files ?? []) && event.preventDefault());
  }

  #clearMask() {
    this.#mask.getContext("2d").clearRect(0, 0, this.#mask.width, this.#mask.height);
    this.#isPainted = false;
  }

  #paint() {
    let last = null;
    const place = (event) => {
      const box = this.#mask.getBoundingClientRect();
      const scale = this.#mask.width / box.width;
      return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    };
    const stroke = (event) => {
      const brush = this.#mask.getContext("2d");
      const isPaint = document.querySelector("#mask-dialog [name=tool]:checked").value === "paint";
      const next = place(event);
      brush.globalCompositeOperation = isPaint ? "source-over" : "destination-out";
      brush.strokeStyle = "#ff00aa";
      brush.lineWidth = (Number(byId("brush").value) * Math.min(this.#mask.width, this.#mask.height)) / 100;
      [brush.lineCap, brush.lineJoin] = ["round", "round"];
      brush.beginPath();
      brush.moveTo(...(last ?? next));
      brush.lineTo(...next);
      brush.stroke();
      brush.globalCompositeOperation = "source-over";
      last = next;
      if (isPaint) this.#isPainted = true;
    };
    this.#mask.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.#mask.setPointerCapture(event.pointerId);
      last = null;
      stroke(event);
    });
    this.#mask.addEventListener("pointermove", (event) => last && stroke(event));
    for (const name of ["pointerup", "pointercancel"]) this.#mask.addEventListener(name, () => (last = null));
  }
}

function draw(canvas, picture) {
  [canvas.width, canvas.height] = [picture.width, picture.height];
  canvas.getContext("2d").drawImage(picture, 0, 0);
}
