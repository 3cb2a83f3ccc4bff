"""The dashboard against Grafana's own types, which its panels are made from. No Grafana runs here."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.observability.prometheus import ROOT
from tools import dashboard

PACKAGES = ROOT / ".grafana" / "node_modules"
"""Where `make test-deploy` puts @grafana/schema and the compiler."""

_TYPES = PACKAGES / "@grafana" / "schema" / "dist" / "types" / "raw"
_HEAD = f"""
import type {{ DataQuery }} from '{PACKAGES}/@grafana/schema';
import type {{ Dashboard }} from '{_TYPES}/dashboard/x/types.gen';
import type * as timeseries from '{_TYPES}/composable/timeseries/panelcfg/x/types.gen';

// An enum takes no text that stands in JSON.
type Text<T> = T extends string ? `${{T}}` : T extends (infer U)[] ? Text<U>[]
  : T extends object ? {{ [K in keyof T]: Text<T[K]> }} : T;
interface Query extends DataQuery {{ expr: string; legendFormat?: string }}
"""


def _checked(content: dict[str, object], folder: Path) -> str:
    """What the compiler says about a dashboard; empty: nothing."""
    panels = content["panels"]
    assert isinstance(panels, list)
    lines = [_HEAD, f"export const dashboard: Text<Dashboard> = {json.dumps(content)};"]
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["type"] == "timeseries", "name the types of its options above"
        custom = panel["fieldConfig"]["defaults"]["custom"]
        lines.append(f"export const options{panel['id']}: Text<timeseries.Options> = {json.dumps(panel['options'])};")
        lines.append(f"export const fields{panel['id']}: Text<timeseries.FieldConfig> = {json.dumps(custom)};")
        lines.append(f"export const queries{panel['id']}: Text<Query>[] = {json.dumps(panel['targets'])};")
    (folder / "dashboard.ts").write_text("\n".join(lines), encoding="utf-8")
    compiler = [str(PACKAGES / ".bin" / "tsc"), "--noEmit", "--strict", "--skipLibCheck"]
    compiler += ["--moduleResolution", "bundler", "--module", "esnext", "dashboard.ts"]
    return subprocess.run(compiler, cwd=folder, capture_output=True, text=True, timeout=120, check=False).stdout


@pytest.fixture
def content() -> dict[str, object]:
    """The dashboard, where the compiler is."""
    if not _TYPES.exists() or shutil.which("node") is None:
        pytest.skip("Grafana's types are not here; make test-deploy fetches them")
    found: dict[str, object] = json.loads(dashboard.DASHBOARD.read_text())
    return found


@pytest.mark.slow
def test_grafana_knows_every_field_of_the_dashboard(tmp_path: Path, content: dict[str, object]) -> None:
    """A field that it does not know is dropped at the import, and with it a unit, a legend or a whole panel."""
    assert _checked(content, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong"), [('"unit":', '"unid":'), ('"sort": "desc"', '"sort": "down"')])
def test_a_field_that_it_does_not_know_is_found(
    tmp_path: Path, content: dict[str, object], right: str, wrong: str
) -> None:
    """A check that finds nothing could be one that looks at nothing."""
    text = json.dumps(content)
    assert right in text
    assert wrong.split('"')[-2] in _checked(json.loads(text.replace(right, wrong, 1)), tmp_path)
