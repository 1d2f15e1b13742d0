// What a reader does on a report, one thing after the other; what the page shows then is left in it as JSON.
(async () => {
  const seen = {}, all = selector => [...document.querySelectorAll(selector)];
  const choice = document.getElementById("against"), field = document.getElementById("search");
  const wait = () => new Promise(done => setTimeout(done, 400));
  const shown = line => [line.dataset.operator ?? line.cells[0].textContent + " " + line.cells[1].textContent,
    ...[...line.querySelectorAll("[data-f]:not([data-f=strip])")].map(x => x.dataset.f + " " + (x.querySelector("b") ? "bold " : "") + x.textContent.trim())];
  const table = () => all("tr[data-operator], tr[data-case]").map(shown);
  const cases = () => all("tr[data-case]").map(x => x.cells[0].textContent + " " + x.cells[1].textContent.trim());
  const click = (selector, text) => all(selector).find(x => x.textContent.startsWith(text)).click();
  const against = name => { choice.value = name; choice.dispatchEvent(new Event("change")); return table(); };
  const search = async text => {
    field.value = text; field.dispatchEvent(new Event("input")); await wait();
    return {
      said: document.getElementById("found").textContent,
      rows: all("tbody.keep tr:not(.case)").filter(x => x.checkVisibility()).map(x => x.closest("tbody").dataset.text.split(" ").slice(0, 2).join(" ") + " " + x.cells[0].textContent.trim()),
      cases: all("tr[data-case]").filter(x => x.checkVisibility()).length,
      open: all("details.rows").filter(x => x.open).length,
    };
  };
  const head = "section.part:has([data-case]) th";

  seen.tools = !document.querySelector("nav .tools").hidden;
  seen.options = [...choice.options].map(x => x.value);
  seen.first = table();
  seen.torch = against("torch");
  seen.liger = against("liger");
  seen.again = against("");
  seen.unsorted = cases();
  click(head, "Speedup"); seen.ascending = cases();
  click(head, "Speedup"); seen.descending = cases();
  click(head, "Case"); seen.by_name = cases();
  seen.nothing = await search("");
  seen.words = await search("softmax LIGER");
  seen.nobody = await search("nobody");
  seen.cleared = await search("");
  const links = document.querySelector("nav .links");
  const fades = () => { dispatchEvent(new Event("resize")); return links.classList.contains("more"); };
  seen.links = { fit: fades() };
  links.style = "flex: none; width: 120px"; seen.links.narrow = fades();
  links.scrollTo(links.scrollWidth, links.scrollHeight); seen.links.end = fades();
  seen.links.scrollbar = links.offsetWidth - links.clientWidth + links.offsetHeight - links.clientHeight;
  const left = document.createElement("pre");
  left.id = "seen";
  left.textContent = JSON.stringify(seen);
  document.body.append(left);
})();
