// The pictures that an instruction sees beside its own, as thumbnails; a click removes one.
// Gradio calls this, behind files.js, with `element`, `props` and `server` (gr.HTML, js_on_load).
//
// props.value, JSON, to the page: the names of the pictures, in order

const find = (selector) => element.querySelector(selector);
const list = find(".list"), said = find(".said");

function report() {
  const entries = [...list.children];
  entries.forEach((entry, i) => entry.setAttribute("aria-label", `Remove further picture ${i + 1}`));
  props.value = JSON.stringify(entries.map((entry) => entry.dataset.name));
}

function add(kept) {
  const entry = document.createElement("button"), image = document.createElement("img");
  [entry.type, entry.title, image.src, image.alt] = ["button", "remove", kept.url, ""];
  entry.dataset.name = kept.name;
  entry.append(image);
  entry.addEventListener("click", () => {
    entry.remove();
    report();
  });
  list.append(entry);
  report();
}

async function takeAll(files) {
  for (const file of files) {
    said.textContent = "reading the picture …";
    try {
      const kept = await server.take(await base64Of(file));
      said.textContent = kept.error ?? "";
      if (!kept.error) add(kept);
    } catch (error) {
      said.textContent = `${file.name} could not be read.`;
    }
  }
}

find(".file").addEventListener("change", (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  takeAll(files);
});
element.addEventListener("dragover", (event) => event.preventDefault());
element.addEventListener("drop", (event) => {
  event.preventDefault();
  takeAll(event.dataTransfer?.files ?? []);
});
