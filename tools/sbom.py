"""Writes the bill of materials of a release: which wheels it is made of, and what each of them requires.

``python tools/sbom.py`` reads the wheels in ``dist/`` (``tools/build_wheels.py`` builds them) and writes
``dist/sbom.cdx.json``, in CycloneDX's format 1.6. Each wheel is there with its version, licence, SHA-256 digest and
requirements. A distribution from elsewhere has no version, as pip chooses one when a user installs: what the
wheels allow stands beside each requirement. The wheels themselves contain no code of others.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]
REQUIRES: Final = "pypi:requires"
"""The property of a wheel's component for each requirement, as its metadata spells it."""


def metadata_of(wheel: Path) -> Message:
    """The METADATA file of ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def shipped(wheel: Path, metadata: Message) -> Component:
    """The component of one of our wheels."""
    name, version = canonicalize_name(metadata["Name"]), metadata["Version"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        description=metadata["Summary"],
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref=name,
        licenses=[LicenseFactory().make_from_string(metadata["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        properties=[
            Property(name=REQUIRES, value=text) for text in metadata.get_all("Requires-Dist", ())
        ],
    )


def bill(wheels: list[Path]) -> Bom:
    """What ``wheels`` are, and what they require without any extra."""
    described = {wheel: metadata_of(wheel) for wheel in wheels}
    components = {
        canonicalize_name(metadata["Name"]): shipped(wheel, metadata)
        for wheel, metadata in described.items()
    }
    document = Bom()
    for metadata in described.values():
        requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", ())]
        names = {
            canonicalize_name(each.name)
            for each in requirements
            if each.marker is None or each.marker.evaluate({"extra": ""})
        }
        for name in names - components.keys():
            components[name] = Component(
                name=name,
                type=ComponentType.LIBRARY,
                purl=PackageURL("pypi", name=name),
                bom_ref=name,
            )
        document.register_dependency(
            components[canonicalize_name(metadata["Name"])],
            [components[name] for name in sorted(names)],
        )
    document.components.update(components.values())
    return document


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    folder = parser.parse_args().dist
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        parser.error(f"no wheels in {folder}: `python tools/build_wheels.py` builds them")
    written = folder / "sbom.cdx.json"
    JsonV1Dot6(bill(wheels)).output_to_file(str(written), allow_overwrite=True, indent=2)
    print(written)


if __name__ == "__main__":
    main()
