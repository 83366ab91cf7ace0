// The order of search results. A title with the words that were searched for is better than one with some of them, or
// than a text with all; and a guide is better than a page that was written from the sources, but for the exact name.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,

  score: ([page, title, , , score, , kind]) => {
    const stemmer = new Stemmer();
    const words = (text) => splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word));
    const query = new URLSearchParams(window.location.search).get("q").trim();
    const own = title.split(" > ").pop();
    const wanted = words(query), present = words(own);
    const hits = wanted.filter((word) => present.includes(word)).length;
    const name = /[A-Z][a-z]|[a-z][A-Z]|[_.]/.test(query);
    const object = kind === SearchResultKind.object;
    if (name && (own === query || (object && own.endsWith("." + query)))) score += 100;
    score += (60 * hits) / wanted.length + (10 * hits) / Math.max(present.length, 1);
    if (/^(tutorials|how-to)\//.test(page)) score += 20;
    if (own !== title) score -= 10;
    if (object || page.startsWith("reference/generated/")) score -= 20;
    return score;
  },
};
