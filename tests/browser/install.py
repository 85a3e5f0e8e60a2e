"""Install a headless Chromium into a folder, unless the machine has one: `python install.py FOLDER`.

It comes from the npm registry, where the package @sparticuz/chromium holds the binary and the libraries that it needs, packed
with Brotli, which node unpacks. On a machine that can download Playwright's own, or has Chrome, name that in RLLM_CHROMIUM.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@147.0.0"
UNPACK = """
const {readFileSync, writeFileSync} = require("fs"), {brotliDecompressSync} = require("zlib");
for (const [from, to] of JSON.parse(process.argv[1])) writeFileSync(to, brotliDecompressSync(readFileSync(from)));
"""


FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if found := os.environ.get("RLLM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome"):
        link = folder / "chromium"
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        return
    if not shutil.which("npm"):
        sys.exit("no Chromium was found: install Chrome, name one in RLLM_CHROMIUM, or install node with npm")
    subprocess.run(["npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", folder, PACKAGE], check=True)
    packed = folder / "node_modules/@sparticuz/chromium/bin"
    archives = [path for path in packed.glob("*.tar.br") if path.name != "al2.tar.br"]
    jobs = [(packed / "chromium.br", folder / "chromium"), *((path, folder / path.stem) for path in archives)]
    subprocess.run(["node", "-e", UNPACK, _json(jobs)], check=True)
    (folder / "chromium").chmod(0o755)
    for path in archives:
        with tarfile.open(folder / path.stem) as tar:
            tar.extractall(folder, filter="data")
        (folder / path.stem).unlink()
    (folder / "fonts.conf").write_text(FONTS.format(folder=folder.absolute()))


def _json(jobs: list[tuple[Path, Path]]) -> str:
    return json.dumps([[str(one), str(other)] for one, other in jobs])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
