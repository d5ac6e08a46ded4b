// The page: what shows the state, what chats, the key that both need, and the keyboard.

import { ApiError, ask, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Status } from "./status.js";

const get = (id) => document.getElementById(id);
const dialog = get("key-dialog");

function askKey(why = "") {
  get("key-button").hidden = false;
  get("key-error").textContent = why;
  if (!dialog.open) dialog.showModal();
}

const status = new Status(() => askKey());
const chat = new Chat(status, () => askKey("This key is not one of the server's."));

get("key-button").addEventListener("click", () => askKey());
get("key-cancel").addEventListener("click", () => dialog.close());
get("key-forget").addEventListener("click", () => {
  setKey(null);
  get("key").value = "";
  dialog.close();
});
get("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(get("key").value.trim());
  try {
    await ask("v1/models");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    get("key-error").textContent = error.status === 401 ? "This key is not one of the server's." : error.message;
    return;
  }
  get("key").value = "";
  dialog.close();
  status.needsKey = false;
  status.restart();
  get("message").focus();
});

document.addEventListener("keydown", (event) => {
  if (dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") chat.stop();
  if (event.key === "/" && !event.target.matches("input, textarea")) {
    event.preventDefault();
    get("message").focus();
  }
});

status.restart();
get("message").focus({ preventScroll: true });
