// The page's canvas: shows a picture and paints a mask over it, pixel for pixel, in two dimensions.
// Gradio calls this, behind files.js, with `element`, `props`, `server` and `watch` (gr.HTML,
// js_on_load).
//
// props.value, JSON:  from the page  {"name", "url"}: show this picture, with nothing painted
//                     to the page    {"name", "width", "height", "mask", "expand"}: what is painted,
//                                    the rows' bits one after the other, the first the highest, in
//                                    base64; and the pixels by which the picture grows

const find = (selector) => element.querySelector(selector);
const base = find(".base"), paint = find(".paint"), size = find(".size"), said = find(".said");
const [PAINT] = new Uint32Array(Uint8Array.of(255, 55, 95, 150).buffer);
const MOST_UNDONE = 20;
// Share of the picture below which the served model shows little; 0: of no mask.
const LEAST = Number(element.querySelector(".painter").dataset.least);
const SNAP = 8; // pixels; the sides of a grown picture move by so many
const MOST_ZOOM = 8;
let name = null, width = 0, height = 0;
let margins = [0, 0, 0, 0]; // by which the picture grows: left, top, right, bottom
let zoom = 1;
let mask = new Uint8Array(0);
let before = [];
let last = null; // where the pen is, while it is down
let cursor = [0, 0]; // of the keyboard
let down = false; // the keyboard's pen
const clicks = !find(".clicks").hidden; // whether the server finds what is clicked on

function show(image, called) {
  name = called;
  [width, height] = [image.width, image.height];
  for (const canvas of [base, paint]) [canvas.width, canvas.height] = [width, height];
  base.getContext("2d").drawImage(image, 0, 0);
  mask = new Uint8Array(width * height);
  before = [];
  cursor = [width >> 1, height >> 1];
  down = false;
  extend([0, 0, 0, 0]);
  zoomTo(1);
  size.max = Math.max(8, Math.min(width, height) >> 1);
  size.value = Math.max(2, Math.min(width, height) >> 4);
  element.querySelector(".painter").classList.add("ready");
  report();
}

function say(text) { said.textContent = text; }

// Draws the mask's part from (x0, y0) to (x1, y1), these not included.
function draw(x0, y0, x1, y1) {
  [x0, y0] = [Math.max(x0, 0), Math.max(y0, 0)];
  [x1, y1] = [Math.min(x1, width), Math.min(y1, height)];
  if (x1 <= x0 || y1 <= y0) return;
  const part = new ImageData(x1 - x0, y1 - y0), pixels = new Uint32Array(part.data.buffer);
  for (let y = y0, at = 0; y < y1; y++)
    for (let x = x0; x < x1; x++, at++) if (mask[y * width + x]) pixels[at] = PAINT;
  paint.getContext("2d").putImageData(part, x0, y0);
}

// All pixels whose centre is within the brush round the line between two points.
function line(from, to) {
  const radius = Number(size.value) / 2, value = find(".erase").checked ? 0 : 1;
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]], length = dx * dx + dy * dy;
  const x0 = Math.max(0, Math.floor(Math.min(from[0], to[0]) - radius));
  const y0 = Math.max(0, Math.floor(Math.min(from[1], to[1]) - radius));
  const x1 = Math.min(width, Math.ceil(Math.max(from[0], to[0]) + radius) + 1);
  const y1 = Math.min(height, Math.ceil(Math.max(from[1], to[1]) + radius) + 1);
  for (let y = y0; y < y1; y++)
    for (let x = x0; x < x1; x++) {
      const [px, py] = [x + 0.5 - from[0], y + 0.5 - from[1]];
      const t = length ? Math.min(1, Math.max(0, (px * dx + py * dy) / length)) : 0;
      const [ex, ey] = [px - t * dx, py - t * dy];
      if (ex * ex + ey * ey <= radius * radius) mask[y * width + x] = value;
    }
  draw(x0, y0, x1, y1);
}

// The mask's rows' bits one after the other: of 12 megapixels 1.5 MB.
function bits() {
  const made = new Uint8Array(Math.ceil(mask.length / 8));
  for (let i = 0; i < mask.length; i++) if (mask[i]) made[i >> 3] |= 128 >> (i & 7);
  return made;
}

function keep() {
  before.push(bits());
  if (before.length > MOST_UNDONE) before.shift();
}

// Reports the mask to the page, for its next edit.
function report() {
  const sent = bits();
  let painted = 0;
  for (let i = 0; i < mask.length; i++) painted += mask[i];
  const small = painted > 0 && painted < LEAST * mask.length;
  const hint = " · this model shows little in so small a mask: paint over more";
  const [left, top, right, bottom] = margins, grows = margins.some((margin) => margin);
  const grown = grows ? `, extended to ${left + width + right} × ${top + height + bottom}` : "";
  say(`${width} × ${height} pixels${grown}${small && !grows ? hint : ""}`);
  let text = "";
  for (let i = 0; i < sent.length; i += 32768)
    text += String.fromCharCode(...sent.subarray(i, i + 32768));
  props.value = JSON.stringify({ name, width, height, mask: btoa(text), expand: margins });
}

// Shows the margins by which the picture grows. What is new is edited, whatever is painted.
function extend(pixels) {
  const most = [width, height, width, height];
  margins = pixels.map((margin, side) =>
    Math.min(Math.max(Math.round(margin / SNAP) * SNAP, 0), most[side]));
  const [left, top, right, bottom] = margins, whole = left + width + right;
  find(".grown").style.padding =
    [top, right, bottom, left].map((margin) => `${(100 * margin) / whole}%`).join(" ");
}

function zoomTo(factor) {
  zoom = Math.min(Math.max(factor, 1), MOST_ZOOM);
  find(".frame").style.width = `${100 * zoom}%`;
}

function undo() {
  if (!before.length) return;
  const kept = before.pop();
  for (let i = 0; i < mask.length; i++) mask[i] = (kept[i >> 3] >> (7 - (i & 7))) & 1;
  draw(0, 0, width, height);
  report();
}

function clear() {
  keep();
  mask = new Uint8Array(width * height);
  draw(0, 0, width, height);
  report();
}

function invert() {
  keep();
  for (let i = 0; i < mask.length; i++) mask[i] ^= 1;
  draw(0, 0, width, height);
  report();
}

// Masks a thing, or takes it out of the mask: that at a place {x, y}, or that of the words {text}.
async function pick(place) {
  const [asked, value] = [name, find(".erase").checked ? 0 : 1];
  say("looking what is there …");
  try {
    const found = await server.find({ name: asked, ...place });
    if (asked !== name) return;
    if (found.error) return say(found.error);
    const image = new Image();
    image.src = `data:image/png;base64,${found.mask}`;
    await image.decode();
    if (asked !== name) return;
    const drawn = new OffscreenCanvas(width, height).getContext("2d");
    drawn.drawImage(image, 0, 0);
    const { data } = drawn.getImageData(0, 0, width, height);
    keep();
    for (let i = 0; i < mask.length; i++) if (data[4 * i] > 127) mask[i] = value;
    draw(0, 0, width, height);
    report();
  } catch (error) {
    say("The server could not find the object.");
  }
}

function pickAt([x, y]) { return pick({ x: Math.floor(x), y: Math.floor(y) }); }

function point(event) {
  const box = paint.getBoundingClientRect();
  return [
    ((event.clientX - box.left) * width) / box.width,
    ((event.clientY - box.top) * height) / box.height,
  ];
}

paint.addEventListener("pointerdown", (event) => {
  if (!name || event.button) return;
  if (find(".click").checked) return void pickAt(point(event));
  paint.setPointerCapture(event.pointerId);
  keep();
  last = point(event);
  line(last, last);
});
paint.addEventListener("pointermove", (event) => {
  if (!last) return;
  const next = point(event);
  line(last, next);
  last = next;
});
for (const end of ["pointerup", "pointercancel"])
  paint.addEventListener(end, () => {
    if (!last) return;
    last = null;
    report();
  });

paint.addEventListener("keydown", (event) => {
  if (!name) return;
  const step = Math.max(1, Number(size.value) >> 1);
  const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
  if (moves[event.key]) {
    const [dx, dy] = moves[event.key], from = cursor;
    cursor = [
      Math.min(Math.max(from[0] + dx, 0), width - 1),
      Math.min(Math.max(from[1] + dy, 0), height - 1),
    ];
    if (down) {
      line(from, cursor);
      report();
    }
  } else if (event.key === " ") {
    down = !down;
    if (down) {
      keep();
      line(cursor, cursor);
      report();
    }
  } else if (event.key === "Enter" && clicks) {
    pickAt(cursor);
    return event.preventDefault();
  } else if (event.key === "+" || event.key === "-") {
    size.value = Number(size.value) + (event.key === "+" ? step : -step);
  } else if (event.key === "z" && (event.ctrlKey || event.metaKey)) {
    undo();
  } else if (event.key === "Delete") {
    clear();
  } else return;
  event.preventDefault();
  say(`pen ${down ? "down" : "up"} at ${cursor.map(Math.round).join(", ")}, brush ${size.value}`);
});

find(".undo").addEventListener("click", undo);
find(".clear").addEventListener("click", clear);
find(".invert").addEventListener("click", invert);
find(".smaller").addEventListener("click", () => zoomTo(zoom / 1.5));
find(".larger").addEventListener("click", () => zoomTo(zoom * 1.5));
find(".view").addEventListener("wheel", (event) => {
  if (!event.ctrlKey || !name) return;
  event.preventDefault();
  zoomTo(zoom * (event.deltaY < 0 ? 1.25 : 0.8));
}, { passive: false });

function seek() {
  const text = find(".what").value.trim();
  if (name && text) pick({ text });
}
find(".seek").addEventListener("click", seek);
find(".what").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  seek();
});

// The handles at the sides: dragged, or moved by arrows, they extend the picture.
for (const handle of element.querySelectorAll(".handle")) {
  const side = Number(handle.dataset.side), axis = side % 2, outward = side < 2 ? -1 : 1;
  const moved = (by, from) => extend(from.map((margin, i) => (i === side ? margin + by : margin)));
  let start = null;
  handle.addEventListener("pointerdown", (event) => {
    const pixels = width / paint.getBoundingClientRect().width;
    start = { at: [event.clientX, event.clientY][axis], from: margins, pixels };
    handle.setPointerCapture(event.pointerId);
  });
  handle.addEventListener("pointermove", (event) => {
    if (!start) return;
    const at = [event.clientX, event.clientY][axis];
    moved((at - start.at) * start.pixels * outward, start.from);
  });
  for (const end of ["pointerup", "pointercancel"])
    handle.addEventListener(end, () => {
      if (!start) return;
      start = null;
      report();
    });
  const keys = [["ArrowLeft", "ArrowRight"], ["ArrowUp", "ArrowDown"]][axis];
  handle.addEventListener("keydown", (event) => {
    const direction = keys.indexOf(event.key) * 2 - 1;
    if (direction < -1) return;
    event.preventDefault();
    moved(direction * outward * 4 * SNAP, margins);
    report();
  });
}

// A picture of the user's own: the server has it from then on, so that its edits need not send it.
async function take(file) {
  say("reading the picture …");
  try {
    const kept = await server.take(await base64Of(file));
    if (kept.error) say(kept.error);
    else await load(kept);
  } catch (error) {
    say("The picture could not be read.");
  }
}

async function load(template) {
  const image = new Image();
  image.src = template.url;
  await image.decode();
  show(image, template.name);
}

find(".file").addEventListener("change", (event) => {
  if (event.target.files[0]) take(event.target.files[0]);
  event.target.value = "";
});
const dropped = (event) => event.dataTransfer?.files[0] ?? event.clipboardData?.files[0];
element.addEventListener("dragover", (event) => event.preventDefault());
element.addEventListener("drop", (event) => {
  event.preventDefault();
  if (dropped(event)) take(dropped(event));
});
document.addEventListener("paste", (event) => {
  if (dropped(event)) take(dropped(event));
});

watch("value", () => {
  const template = props.value ? JSON.parse(props.value) : {};
  if (template.url) load(template).catch(() => say("The picture could not be read."));
});
