// The pictures that go with the next message: chosen, dropped on the chat, or pasted.

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff"];
const get = (id) => document.getElementById(id);

export class Pictures {
  /** Take pictures while `canSee()`; `onRefusal` is called with a sentence for files that are not pictures. */
  constructor(canSee, onRefusal) {
    this.canSee = canSee;
    this.onRefusal = onRefusal;
    this.list = []; // of a file's name and its data: URL
    const chooser = get("picture-file");
    chooser.accept = TYPES.join();
    get("add-picture").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.add([...chooser.files]);
      chooser.value = ""; // so that the same file may be chosen again
    });
    const chat = document.querySelector(".chat");
    for (const kind of ["dragenter", "dragover"]) chat.addEventListener(kind, (event) => this.drag(event, true));
    for (const kind of ["dragleave", "drop"]) chat.addEventListener(kind, (event) => this.drag(event, false));
    chat.addEventListener("drop", (event) => this.add([...event.dataTransfer.files]));
    get("message").addEventListener("paste", (event) => this.add([...event.clipboardData.files]));
  }

  /** Let files be dropped here, and show that they may be. */
  drag(event, isOver) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // or the browser would leave the page for the file
    event.currentTarget.classList.toggle("dropping", isOver && this.canSee());
  }

  async add(files) {
    if (!files.length) return;
    if (!this.canSee()) return this.onRefusal("This model takes no pictures.");
    const pictures = files.filter((file) => TYPES.includes(file.type));
    const others = files.filter((file) => !pictures.includes(file));
    const read = await Promise.all(pictures.map(readFile)).catch((error) => this.onRefusal(error.message));
    this.list = [...this.list, ...(read ?? [])];
    this.show();
    if (others.length) this.onRefusal(`${others[0].name} is no picture of a kind that models take.`);
    get("message").focus();
  }

  /** Return the pictures, and forget them. */
  take() {
    const taken = this.list;
    this.put([]);
    return taken;
  }

  /** Have these pictures instead. */
  put(list) {
    this.list = list;
    this.show();
  }

  show() {
    const made = this.list.map((picture) => {
      const item = document.createElement("li");
      const remove = document.createElement("button");
      remove.type = "button";
      remove.textContent = "×";
      remove.ariaLabel = `Remove ${picture.name}`;
      remove.addEventListener("click", () => this.put(this.list.filter((other) => other !== picture)));
      item.append(thumbnail(picture), remove);
      return item;
    });
    get("pictures").replaceChildren(...made);
    get("pictures").hidden = !made.length;
  }
}

/** Return a small view of a picture. */
export function thumbnail({ name, url }) {
  const image = new Image();
  image.src = url;
  image.alt = image.title = name;
  return image;
}

/** Return a message's content in the API's form: the text, after its pictures if there are some. */
export function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function readFile(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done({ name: file.name, url: reader.result });
    reader.onerror = () => fail(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
