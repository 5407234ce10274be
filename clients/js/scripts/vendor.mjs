// Copies the built client, and the parser it needs, to where a web page can load them without a build.
import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";

const root = new URL("..", import.meta.url);
const vendor = new URL("../../examples/web-chat/vendor/", root);
const parser = new URL("node_modules/eventsource-parser/", root);

async function copyScript(from, to) {
  const script = await readFile(from, "utf8");
  await writeFile(to, script.replace(/^\/\/# sourceMappingURL=.*\n?/m, "")); // the maps are not copied
}

await rm(vendor, { recursive: true, force: true });
await mkdir(new URL("tokenflow-client/", vendor), { recursive: true });
await mkdir(new URL("eventsource-parser/", vendor));
for (const name of await readdir(new URL("dist/src/", root))) {
  if (name.endsWith(".js")) await copyScript(new URL(`dist/src/${name}`, root), new URL(`tokenflow-client/${name}`, vendor));
}
await copyScript(new URL("dist/index.js", parser), new URL("eventsource-parser/index.js", vendor));
await copyFile(new URL("LICENSE", parser), new URL("eventsource-parser/LICENSE", vendor));
