# data/download.py - files from the net: resumed where they stopped, checked before use.
#
# A file arrives as NAME.part, with the server's tag for its version in NAME.part.tag. A later try
# asks for the rest of the same version (Range with If-Range) and starts over where the server has
# another one. When it is whole, its size and SHA-256 are compared with what is known, and only then
# it is renamed.

import concurrent.futures
import functools
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import packages
from shard import DataError, sha256_of

requests = packages.optional("requests")
tqdm = packages.optional("tqdm")

HUB = "https://huggingface.co"
TRIES = 6  # in a row without a new byte
FIRST_WAIT_S = 1.0  # doubled after each try
TIMEOUT_S = 30
BLOCK_BYTES = 1 << 16
PARALLEL = 2  # files at a time


@dataclass(frozen=True)
class File:
    """One file of a source; size and sha256 are None where nobody has published them."""

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None


class _Interrupted(Exception):
    """A failure that another try may cure."""


def hub_files(source, repository, no_checksum=False, folder=""):
    """The files of a data set on the hub, in order of name, with their sizes and checksums."""
    url = f"{source}/api/datasets/{repository}/tree/main" + (f"/{folder}" if folder else "")
    entries = []
    while url:
        response = _retry(url, functools.partial(_get, url), threading.Event())
        try:
            entries += [entry for entry in response.json() if entry["type"] == "file"]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{url}: not a listing of the hub") from None
        url = response.links.get("next", {}).get("url")
    return [
        File(
            url=f"{source}/datasets/{repository}/resolve/main/{entry['path']}",
            name=Path(entry["path"]).name,
            size=entry["size"],
            sha256=None if no_checksum else entry.get("lfs", {}).get("oid"),
        )
        for entry in sorted(entries, key=lambda entry: entry["path"])
    ]


def fetch_all(files, folder):
    """The paths of the files in the given order; later ones come while the first ones are used."""
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        futures = [pool.submit(fetch, file, folder, stop) for file in files]
        try:
            for future in futures:
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def fetch(file, folder, stop=None):
    """Brings one file into the folder, or finds it there, and returns its path.

    `stop` is a threading.Event that ends the download at the next block; what came so far is kept.
    """
    stop = stop or threading.Event()
    path = folder / file.name
    if path.exists():
        if wrong := _mismatch(file, path):
            raise DataError(f"{path}: {wrong}: remove it and run again")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    _retry(
        file.url,
        lambda: _receive(file, part, stop),
        stop,
        progress=lambda: part.stat().st_size if part.exists() else 0,
    )
    if wrong := _mismatch(file, part):
        part.unlink()
        _tag_of(part).unlink(missing_ok=True)
        raise DataError(
            f"{file.url}: {wrong}: damaged on the way or another file; "
            f"removed, run again to fetch it anew"
        )
    part.replace(path)
    _tag_of(part).unlink(missing_ok=True)
    return path


def _mismatch(file, path):
    """How the file on the disk differs from what is known about it, or None."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"{size} bytes, expected {file.size}"
    if file.sha256 is not None and (checksum := sha256_of(path)) != file.sha256:
        return f"sha256 {checksum}, expected {file.sha256}"
    return None


def _retry(url, action, stop, progress=lambda: 0):
    """Runs the action until it succeeds, or has failed TRIES times in a row without progress."""
    failures, last = 0, progress()
    while True:
        try:
            return action()
        except (_Interrupted, requests.RequestException) as error:
            failures = 1 if progress() > last else failures + 1
            last = progress()
            if failures == TRIES:
                raise DataError(
                    f"{url}: gave up after {TRIES} tries ({error}); run again to go on"
                ) from None
            if stop.wait(FIRST_WAIT_S * 2 ** (failures - 1)):
                raise


def _get(url, headers=None):
    response = requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S)
    if response.status_code == 429 or response.status_code >= 500:
        raise _Interrupted(f"the server answered {response.status_code}")
    if response.status_code >= 400 and response.status_code != 416:
        raise DataError(f"{url}: the server answered {response.status_code} {response.reason}")
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise DataError(f"{url}: the server answered with a web page instead of the file")
    return response


def _tag_of(part):
    return part.with_name(part.name + ".tag")


def _receive(file, part, stop):
    """One request: the rest of the file, or all of it where the rest cannot be asked for."""
    tag = _tag_of(part)
    have = part.stat().st_size if part.exists() and tag.exists() else 0
    if have and have == file.size:
        return
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.read_text()}
    with _get(file.url, headers) as response:
        if response.status_code == 416:  # what is here is no beginning of what is there
            part.unlink()
            raise _Interrupted("the file changed at the source")
        if response.status_code != 206:
            have = 0
            part.unlink(missing_ok=True)  # before the new tag: it must never stand beside old bytes
            _remember(response, tag)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        _check_room(part, total, have)
        bar = tqdm.tqdm(
            desc=file.name,
            total=total,
            initial=have,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,
        )
        with open(part, "ab" if have else "wb") as out, bar:
            for block in response.iter_content(BLOCK_BYTES):
                out.write(block)
                bar.update(len(block))
                if stop.is_set():
                    raise concurrent.futures.CancelledError
    if total is not None and part.stat().st_size < total:
        raise _Interrupted(f"the connection ended at byte {part.stat().st_size} of {total}")


def _remember(response, tag):
    """Keeps what names this version of the file; weak tags (W/) do not promise equal bytes."""
    etag = response.headers.get("ETag", "")
    version = etag if etag.startswith('"') else response.headers.get("Last-Modified")
    if version:
        tag.write_text(version)
    else:
        tag.unlink(missing_ok=True)


def _check_room(part, total, have):
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - have > free:
        raise DataError(
            f"{part.parent}: {total - have} bytes still to come, {free} bytes free on the disk"
        )
