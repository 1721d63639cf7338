// Starts the panels: each asks for its answer when a parameter of its own changes.
import * as approximation from "explorer/approximation";
import * as capacity from "explorer/capacity";
import * as controls from "explorer/controls";
import * as cost from "explorer/cost";
import * as reassociation from "explorer/reassociation";
import { compute } from "explorer/source";
import { listen, parameters, settings, setup, strange } from "explorer/state";

const alert = (id, text) => {
  const node = document.querySelector(`#${id} > .alert`);
  node.textContent = text;
  node.hidden = text === "";
};

function start({ name, render }) {
  const own = parameters(name);
  const body = document.querySelector(`#${name} > .body`);
  let asking = false, again = false, answer = null;
  const show = () => {
    try {
      render(answer, body);
      body.hidden = false;
      alert(name, "");
    } catch (error) {
      body.hidden = true;
      alert(name, error.message);
    }
  };
  // One question at a time: while one is on its way, only the last of the later ones is asked.
  const ask = async () => {
    again = asking;
    if (asking) return;
    asking = true;
    body.setAttribute("aria-busy", "true");
    try {
      answer = await compute(name, settings(name));
      show();
    } catch (error) {
      answer = null;
      body.hidden = true;
      alert(name, error.message);
    }
    asking = false;
    body.removeAttribute("aria-busy");
    if (again) await ask();
  };
  listen((changed) => {
    if (changed.some((each) => own.has(each))) ask();
    else if (answer && changed.some((each) => each === "query" || each === "prefix")) show();
  });
  return ask();
}

for (const [panel, module] of Object.entries({ reassociation, cost, approximation, capacity })) {
  controls.build(panel, document.querySelector(`#${panel} > .controls`), module.more);
}
if (strange.length) alert("page", `The address names what this page does not know: ${strange.slice(0, 5).map((each) => each.slice(0, 40)).join(", ")}.`);
for (const link of document.querySelectorAll("a[data-document]")) {
  if (setup.documents) link.href = `docs/${link.dataset.document}${setup.documents}`;
  else link.replaceWith(`${link.textContent}: docs/${link.dataset.document} in the documentation of reassoc`);
  if (setup.documents === ".md") link.append(" (plain text; make docs formats it)");
}
await Promise.all([start(reassociation), start(cost), start(approximation), start(capacity), start(capacity.overwriting)]);
document.documentElement.dataset.ready = "true";
