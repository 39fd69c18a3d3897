// The connection to the program that served this page. The token comes behind the `#` of the
// address, which browsers do not send, and stays in this tab.

const KEPT = "roommate-token";

export function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEPT);
}

export function keep(given) {
  sessionStorage.setItem(KEPT, given.trim());
}

export class Refused extends Error {
  constructor(what, hint, status) {
    super(what);
    Object.assign(this, { hint, status });
  }
}

async function refusal(response) {
  const reply = await response.json().catch(() => ({}));
  const error = reply.error ?? reply.busy ?? { what: `the answer has status ${response.status}` };
  return new Refused(error.what, error.hint ?? null, response.status);
}

const head = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEPT) ?? ""}` });

/** Sends a request; the answer is what is in it. */
export async function ask(verb, fields = {}) {
  const response = await fetch(`/v1/${verb}`, { method: "POST", headers: head(), body: JSON.stringify(fields) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Reads messages until there are no more. Events of the browser cannot carry a token. */
export async function stream(number, take) {
  const response = await fetch(`/v1/stream/${number}`, { headers: head() });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.lastIndexOf("\n\n");
    if (whole < 0) continue;
    for (const event of text.slice(0, whole).split("\n\n")) {
      if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
    }
    text = text.slice(whole + 2);
  }
}
