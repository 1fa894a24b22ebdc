const field = document.getElementById("search"), hits = document.getElementById("hits");
const rollouts = [...document.querySelectorAll("details.rollout:not(.session)")];
let texts = null, places = [], at = -1, waiting = 0;
function placesOf(rollout, wanted) {
  const found = [], walk = document.createTreeWalker(rollout, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const text = node.data.toLowerCase();
    if (text.length !== node.data.length) continue;
    for (let i = text.indexOf(wanted); i >= 0 && found.length < 1000; i = text.indexOf(wanted, i + wanted.length)) {
      const range = new Range();
      range.setStart(node, i); range.setEnd(node, i + wanted.length);
      found.push(range);
    }
  }
  return found;
}
function search() {
  const wanted = field.value.toLowerCase();
  texts = texts || rollouts.map(rollout => rollout.textContent.toLowerCase());
  let count = 0;
  places = []; at = -1;
  rollouts.forEach((rollout, i) => {
    const fits = texts[i].includes(wanted);
    rollout.hidden = !fits;
    count += fits;
    if (fits && wanted && places.length < 5000) places.push(...placesOf(rollout, wanted));
  });
  hits.textContent = wanted ? `in ${count} of ${rollouts.length} rollouts` : `${rollouts.length} rollouts`;
  if (window.Highlight) CSS.highlights.set("found", new Highlight(...places));
}
function next() {
  if (!places.length) return;
  at = (at + 1) % places.length;
  const place = places[at], element = place.startContainer.parentElement;
  element.closest("details").open = true;
  element.scrollIntoView({block: "nearest"});
  const box = place.getBoundingClientRect();
  window.scrollBy(0, box.top - window.innerHeight / 2);
  if (window.Highlight) CSS.highlights.set("here", new Highlight(place));
  hits.textContent = `place ${at + 1} of ${places.length}`;
}
if (field) {
field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 150); });
field.addEventListener("keydown", event => { if (event.key === "Enter") next(); });
document.getElementById("next").addEventListener("click", next);
document.getElementById("all").addEventListener("click", () => {
  const shown = rollouts.filter(rollout => !rollout.hidden), open = !shown.every(rollout => rollout.open);
  shown.forEach(rollout => { rollout.open = open; });
});
}
// Sessions: filters, and an order in which the largest come first.
const sessions = [...document.querySelectorAll("details.session")], filters = document.getElementById("filters");
const abouts = sessions.map(session => JSON.parse(session.dataset.about));
let sessionTexts = null, sorted = "";
function filterSessions() {
  const [text, tool, branch, state, low, high, order] =
    ["text", "tool", "branch", "state", "low", "high", "order"].map(id => document.getElementById(id).value);
  const wanted = text.toLowerCase();
  if (wanted) sessionTexts = sessionTexts || sessions.map(session => session.textContent.toLowerCase());
  let count = 0;
  sessions.forEach((session, i) => {
    const about = abouts[i], reward = about.reward;
    const fits = (!wanted || sessionTexts[i].includes(wanted)) && (!tool || about.tools.includes(tool))
      && (!branch || about.branches.includes(branch)) && (!state || about.failed === (state === "failed"))
      && (low === "" || reward !== null && reward >= Number(low))
      && (high === "" || reward !== null && reward <= Number(high));
    session.hidden = !fits;
    count += fits;
  });
  document.getElementById("found").textContent = `${count} of ${sessions.length} sessions`;
  if (order === sorted) return;
  sorted = order;
  const value = i => abouts[i][order] ?? -Infinity;
  const places = sessions.map((_, i) => i);
  if (order) places.sort((i, j) => value(j) - value(i) || i - j);
  filters.parentElement.append(...places.map(i => sessions[i]));
}
if (filters) filters.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filterSessions, 150); });
