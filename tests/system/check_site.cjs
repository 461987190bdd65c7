// Looks at the site in headless Chromium: `make site-check`.
//
// node check_site.cjs SITE PICTURES [PAGE...]
//
// Each page that is named is opened from its file, light and dark, wide and narrow, and its pictures go into PICTURES; of
// all pages, if none is named, two of these views are opened. Faults, which make the exit status 1: serious and critical
// ones that axe-core finds, requests that leave the folder, errors of scripts, and pages wider than the window. The search
// must find a page.
const fs = require("fs");
const os = require("os");
const path = require("path");
const { pathToFileURL } = require("url");
const axe = require("axe-core");
const { chromium } = require("playwright-core");

const VIEWS = [["light", 1400], ["dark", 390], ["dark", 1400], ["light", 390]];
const FLAGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];

async function look(page, url) {
  const faults = [];
  page.on("request", (request) => {
    if (!/^(file|data|blob|about):/.test(request.url())) faults.push(`loads ${request.url()}`);
  });
  page.on("pageerror", (error) => faults.push(String(error)));
  await page.goto(url);
  await page.waitForTimeout(200); // for scripts that change the page
  const wider = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (wider > 0) faults.push(`is ${wider} pixels wider than the window`);
  await page.evaluate(axe.source);
  const found = await page.evaluate(() => axe.run());
  for (const { id, impact, help, nodes } of found.violations) {
    if (impact === "serious" || impact === "critical") {
      faults.push(`${impact}: ${id} (${help}), ${nodes.length} times, first ${nodes[0].html.slice(0, 120)}`);
    }
  }
  return faults;
}

async function search(page, url, words) {
  await page.goto(url);
  await page.click("input.md-search__input");
  await page.keyboard.type(words);
  await page.waitForSelector(".md-search-result__item", { timeout: 20000 });
}

async function main([site, pictures, ...named]) {
  const pages = named.length ? named : fs.readdirSync(site).filter((name) => name.endsWith(".html") && name !== "404.html");
  const executablePath = process.env.CHROMIUM || "/usr/bin/chromium";
  const profile = fs.mkdtempSync(path.join(os.tmpdir(), "site-"));
  let failed = 0;
  fs.mkdirSync(pictures, { recursive: true });
  for (const [colorScheme, width] of named.length ? VIEWS : VIEWS.slice(0, 2)) {
    const folder = path.join(profile, `${colorScheme}-${width}`);
    const viewport = { width, height: 1200 };
    const browser = await chromium.launchPersistentContext(folder, { executablePath, args: FLAGS, colorScheme, viewport });
    for (const name of pages) {
      const page = await browser.newPage();
      const faults = await look(page, pathToFileURL(path.resolve(site, name)).href);
      faults.forEach((fault) => console.log(`${name}, ${colorScheme}, ${width}: ${fault}`));
      failed += faults.length;
      if (named.length) await page.screenshot({ path: path.join(pictures, `${name}-${colorScheme}-${width}.png`) });
      await page.close();
    }
    if (width > 1000) {
      await search(await browser.newPage(), pathToFileURL(path.resolve(site, "index.html")).href, "all-reduce");
    }
    await browser.close();
  }
  fs.rmSync(profile, { recursive: true });
  console.log(`${pages.length} pages, ${failed} faults`);
  return failed ? 1 : 0;
}

main(process.argv.slice(2)).then((status) => process.exit(status), (error) => {
  console.error(error);
  process.exit(2);
});
