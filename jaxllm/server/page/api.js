// Requests to the server that this page is from: with its key, and with errors in words.

const KEY = "jaxllm-key";
let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Use a key, which stays in this tab alone; null for none. */
export function setKey(value) {
  key = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // A browser that keeps nothing has the key until the page is left.
  }
}

/** What went wrong, in words; `status` is HTTP's, or 0 where no answer came. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Return the answer to a GET request, or to a POST of `body` as JSON. Throws ApiError, and AbortError for `signal`. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw new ApiError(await explain(response), response.status);
  return response;
}

async function explain(response) {
  try {
    const { error } = await response.json();
    if (error.message) return error.message;
  } catch {
    // A proxy in front of the server answers in another form.
  }
  return `The server has answered with status ${response.status}.`;
}

/** Yield the frames of a stream of events, each without the empty line that ends it. */
export async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      yield* parts;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection has broken.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
