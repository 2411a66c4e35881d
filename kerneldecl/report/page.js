"use strict";
// Details of entries lie compressed in the page, some entries a piece, and are unpacked when one of them is opened.
const pieces = new Map();

async function unpacked(number) {
  const bytes = Uint8Array.from(atob(document.getElementById(`p${number}`).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return (await new Response(stream).text()).split("\0");
}

function detail(number) {
  const size = Number(document.body.dataset.piece);
  const piece = Math.floor(number / size);
  if (!pieces.has(piece)) pieces.set(piece, unpacked(piece));
  return pieces.get(piece).then((found) => found[number % size]);
}

const body = document.querySelector("#entries tbody");
const rows = () => [...body.querySelectorAll("tr[id]")];
const opened = (row) => (row.nextElementSibling?.classList.contains("detail") ? row.nextElementSibling : null);

async function open(row) {
  if (opened(row)) return;
  const html = await detail(Number(row.id.slice(1)));
  if (opened(row)) return;
  const shown = document.createElement("tr");
  shown.className = "detail";
  const cell = shown.appendChild(document.createElement("td"));
  cell.colSpan = row.cells.length;
  cell.innerHTML = `<div class="inside">${html}</div>`; // made and escaped when the report was written
  row.after(shown);
  row.querySelector("button").setAttribute("aria-expanded", "true");
}

function close(row) {
  opened(row)?.remove();
  row.querySelector("button").setAttribute("aria-expanded", "false");
}

async function go() {
  const row = /^#e\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
  if (!row) return;
  row.hidden = false;
  await open(row);
  row.querySelector("button").focus({ preventScroll: true });
  row.scrollIntoView({ block: "start" });
}

body.addEventListener("click", (event) => {
  const button = event.target.closest("tr[id] button");
  const row = button?.closest("tr");
  if (row) opened(row) ? close(row) : open(row);
});

// Sorting and filtering.
const value = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent;

document.querySelector("#entries thead").addEventListener("click", (event) => {
  const head = event.target.closest("button")?.closest("th");
  if (!head) return;
  const column = head.cellIndex;
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const isNumber = "number" in head.dataset;
  const compare = (a, b) => (isNumber ? (a === "" ? 1 : b === "" ? -1 : sign * (a - b)) : sign * a.localeCompare(b, "en", { numeric: true }));
  const sorted = rows().map((row) => [value(row, column), row, opened(row)]).sort((a, b) => compare(a[0], b[0]));
  body.append(...sorted.flatMap(([, row, more]) => (more ? [row, more] : [row])));
});

const filter = document.getElementById("filter");
const count = document.getElementById("count");

filter.addEventListener("input", () => {
  const wanted = filter.value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const row of rows()) {
    const text = row.textContent.toLowerCase();
    row.hidden = !wanted.every((word) => text.includes(word));
    if (row.hidden) close(row);
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows().length}`;
});

document.getElementById("all").addEventListener("click", async () => {
  for (const row of rows().filter((each) => !each.hidden).slice(0, 50)) await open(row);
});

// Dots: what they say, under the pointer and under the focus; arrow keys go from one to the next.
const tip = document.getElementById("tip");

function say(link) {
  document.querySelector("a.near")?.classList.remove("near");
  tip.hidden = !link;
  if (!link) return;
  link.classList.add("near");
  tip.textContent = link.getAttribute("aria-label");
  const spot = link.getBoundingClientRect();
  const left = Math.min(spot.left + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${spot.top + scrollY - tip.offsetHeight - 10}px`;
}

function nearest(svg, event) {
  let best = null;
  let least = 18 ** 2;
  for (const link of svg.querySelectorAll("a")) {
    const box = link.getBoundingClientRect();
    const distance = (box.x + box.width / 2 - event.clientX) ** 2 + (box.y + box.height / 2 - event.clientY) ** 2;
    if (distance < least) [best, least] = [link, distance];
  }
  return best;
}

for (const svg of document.querySelectorAll("svg.dots")) {
  const links = [...svg.querySelectorAll("a")];
  links.forEach((link, place) => link.setAttribute("tabindex", place ? "-1" : "0"));
  svg.addEventListener("pointermove", (event) => say(nearest(svg, event)));
  svg.addEventListener("pointerleave", () => say(null));
  // Chromium makes an SVG that listens to the focus a stop of Tab itself.
  svg.parentElement.addEventListener("focusin", (event) => say(event.target.closest("a")));
  svg.parentElement.addEventListener("focusout", () => say(null));
  svg.addEventListener("click", (event) => {
    const link = nearest(svg, event);
    if (!link || event.target.closest("a")) return;
    location.hash = link.getAttribute("href");
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const from = links.indexOf(event.target.closest("a"));
    if (!step || from < 0) return;
    event.preventDefault();
    const to = links[(from + step + links.length) % links.length];
    links[from].setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  });
}

addEventListener("hashchange", go);
go();
