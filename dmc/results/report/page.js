"use strict";

const root = document.documentElement;
const remembered = { // a page opened from a file may have no storage
  get() { try { return localStorage.getItem("theme"); } catch { return null; } },
  set(value) { try { localStorage.setItem("theme", value); } catch { /* the choice holds for this visit */ } },
};
if (remembered.get()) root.dataset.theme = remembered.get();
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remembered.set(root.dataset.theme);
});

const parse = (text) => parseFloat(text.replaceAll(",", "")); // what stands behind a number is passed over

function compare(first, second, sign, isNumber) {
  const isEmpty = (text) => text === "" || text === "-";
  if (isEmpty(first) || isEmpty(second)) return isEmpty(first) - isEmpty(second); // empty cells stay last
  if (isNumber) return sign * (parse(first) - parse(second));
  return sign * first.localeCompare(second, undefined, { numeric: true });
}

function sortBy(header) {
  const table = header.closest("table");
  const column = [...header.parentNode.children].indexOf(header);
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of header.parentNode.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = table.tBodies[0], isNumber = header.classList.contains("number");
  const rows = [...body.rows].map((row) => ({ row, text: row.cells[column].textContent.trim() }));
  rows.sort((first, second) => compare(first.text, second.text, ascending ? 1 : -1, isNumber));
  body.append(...rows.map((entry) => entry.row));
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortBy(button.parentNode));
}

for (const input of document.querySelectorAll(".filter")) {
  const rows = input.parentNode.querySelectorAll("tbody tr");
  input.addEventListener("input", () => {
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(input.value.toLowerCase());
  });
}

const tip = document.getElementById("tip");
function light(method) {
  for (const element of document.querySelectorAll("[data-method]")) element.classList.toggle("on", element.dataset.method === method);
  for (const svg of document.querySelectorAll("figure svg")) svg.classList.toggle("lit", svg.querySelector(".mark.on") !== null);
}
function show(mark) {
  light(mark.dataset.method);
  if (!mark.dataset.tip) return;
  tip.textContent = mark.dataset.tip;
  tip.hidden = false;
  const spot = mark.getBoundingClientRect();
  const left = Math.min(Math.max(8, spot.left + spot.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${spot.top > tip.offsetHeight + 12 ? spot.top - tip.offsetHeight - 8 : spot.bottom + 8}px`;
}
function hide() {
  tip.hidden = true;
  light(null);
}
for (const mark of document.querySelectorAll(".mark[data-tip], tbody tr")) {
  mark.addEventListener("pointerenter", () => show(mark));
  mark.addEventListener("pointerleave", hide);
  mark.addEventListener("focus", () => show(mark));
  mark.addEventListener("blur", hide);
}
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
