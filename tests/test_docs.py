"""What the README and docs/ say about files, commands and links is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolkit.checkpoints.tokenizer import load_tokenizer
from toolkit.cli import app
from toolkit.config.load import load_config

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TENSORRT_LLM = ROOT / "docs" / "tensorrt_llm.md"
BASIS = r"\b(?:tried|stand-in|read|not run)\b"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = (README, *sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("configs/*/README.md"))))

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# In docs/architecture.md: speculative/acceptance.py, plan/rules/, and `SpeculativeRuntime.step`.
PATH = re.compile(r"(?<![\w/.*}-])((?:[\w-]+/)*[\w-]+\.(?:py|txt)|(?:[a-z_]+/)+)(?=[\s`,;:.)]|$)")
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?<!\.py)`")
COMMAND = re.compile(r"^(?:    |\s*\$ )(?:.*/)?toolkit (\w[\w-]*)", re.MULTILINE)
MODULE = re.compile(r"python (?:-m )?((?:tests\.benchmarks|configs/)[\w./]*)")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    images = [(source, "") for source in re.findall(r'<img src="([^"]+)"', text)]
    for target, anchor in (*LINK.findall(text), *images):
        linked = page if not target else page.parent / target
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    commands = {
        command.name or (command.callback.__name__ if command.callback else "")
        for command in app.registered_commands
    }
    commands |= {group.name or "" for group in app.registered_groups}
    named = set(COMMAND.findall(page.read_text(encoding="utf-8")))
    assert named <= commands | {"version"}


def test_the_programs_that_made_the_figures_exist() -> None:
    for page in PAGES:
        for name in MODULE.findall(page.read_text(encoding="utf-8")):
            program = ROOT / (name if name.endswith(".py") else name.rstrip(".").replace(".", "/"))
            assert program.exists() or program.with_suffix(".py").exists(), f"{page.name}: {name}"


def blocks(page: Path) -> list[list[str]]:
    """The paragraphs, list items and tables of a page, each as its lines; without headings, code
    and comments.
    """
    made: list[list[str]] = [[]]
    for line in page.read_text(encoding="utf-8").splitlines():
        is_skipped = not line.strip() or line.startswith(("#", "    ", "<!--"))
        if is_skipped or line.startswith("- "):
            made.append([])
        if not is_skipped:
            made[-1].append(line.strip())
    return [block for block in made if block]


def test_everything_about_tensorrt_llm_says_what_it_rests_on() -> None:
    """A paragraph that ends in a colon leads to what follows it. A table has its mark before that
    colon or behind itself. Items that begin with a mark explain it.
    """
    page = blocks(TENSORRT_LLM)
    for number, block in enumerate(page):
        text = " ".join(block)
        if block[0].startswith("|"):
            before, behind = page[number - 1][-1], page[number + 1][0]
            assert before.endswith("]*:") or behind.startswith("*["), block[0]
        elif not text.endswith(":") and not text.startswith("- *["):
            assert text.endswith("]*"), text
        for basis in re.findall(r"\*\[([^\]]*)\]\*", text):
            assert set(re.findall(BASIS, basis)), basis
    assert len(page) > 40


def test_clients_of_the_engine_flow_find_every_tensor_in_the_other_flow() -> None:
    from toolkit.facts.triton_tensors import BLS, LLMAPI
    from toolkit.triton.tensors.contract import BLS_INPUTS
    from toolkit.triton.tensors.trtllm_tensors import OUR_INPUTS

    text = TENSORRT_LLM.read_text(encoding="utf-8")
    table = text.split("<!-- tensors: begin -->\n")[1].split("<!-- tensors: end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    ours = {spec.name for spec in BLS_INPUTS}
    before = {tensor.name for tensor in BLS.inputs} | ours
    after = {tensor.name for tensor in LLMAPI.inputs} | {spec.name for spec in OUR_INPUTS}
    named = set()
    for left, right in rows:
        names = re.findall(r"`(\w+)`", left)
        assert names and set(names) <= before, left
        named |= set(names)
        assert right == "none" or right.strip("`") in after, right
        assert right != "none" or not set(names) & after, left
    # What is asked for by the same name on both sides need not be listed.
    missing = {name for name in before - named if name not in after}
    assert missing <= {
        *("decoder_text_input", "image_input", "image_bytes_input", "image_url_input"),
        *("video_bytes_input", "prompt_embedding_table", "prompt_vocab_size"),
        *("prompt_table_extra_id", "lora_task_id", "lora_weights", "lora_config"),
        *("guided_decoding_guide_type", "guided_decoding_guide"),
    }


def test_the_page_names_the_containers_of_every_version() -> None:
    from toolkit.facts.versions import VERSIONS

    table = TENSORRT_LLM.read_text(encoding="utf-8").split("| its Python packages are in |")[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:7]]
    stated = {}
    for tags, release, _ in rows:
        first, *rest = re.findall(r"\d\d\.\d\d", tags)
        for row in VERSIONS.values():
            if row.release == release:
                stated[release] = (first, *rest)
                assert {first, *rest} == {min(row.serving_tags), max(row.serving_tags)}
    assert set(stated) == {row.release for row in VERSIONS.values() if row.serving_tags}


def named_files(text: str) -> list[str]:
    """The files and folders that a text names; words in capitals stand for many."""
    return [path for path in PATH.findall(text) if not PLACEHOLDER.search(path)]


def place(path: str) -> Path:
    """Paths of docs/architecture.md start in toolkit/, but for those of tests, docs and configs."""
    outside = path.startswith(("tests/", "docs/", "configs/"))
    return (ROOT if outside else ROOT / "toolkit") / path


def test_the_architecture_page_names_files_that_exist() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert [path for path in named_files(text) if not place(path).exists()] == []


def test_what_the_architecture_page_says_is_in_a_file_is_there() -> None:
    table = ARCHITECTURE.read_text(encoding="utf-8").split("## Where is")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and ".py`" in row]
    assert len(rows) > 15
    for row in rows:
        files = [place(path) for path in named_files(row) if path.endswith(".py")]
        if not files:
            continue  # a file per stage
        sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in NAME.findall(row):
            assert re.search(rf"\b{name.split('.')[-1]}\b", sources), f"{name}: {row}"


def test_the_architecture_page_names_every_package() -> None:
    table = ARCHITECTURE.read_text(encoding="utf-8").split("## Packages")[1]
    parts = {
        path.name + ("/" if path.is_dir() else "")
        for path in (ROOT / "toolkit").iterdir()
        if not path.name.startswith("__") and (path.is_dir() or path.suffix == ".py")
    }
    assert {part for part in parts if f"`{part}" not in table} == set()


def test_the_first_yaml_of_the_readme_is_the_quickstart(tmp_path: Path) -> None:
    """The same deployment, without comments and defaults, and without the limit of calibration
    texts, which cuts none of them.
    """
    lines = README.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    assert len(lines.splitlines()) == 12
    (tmp_path / "readme.yaml").write_text(lines, encoding="utf-8")
    (tmp_path / "quickstart").symlink_to(ROOT / "configs" / "quickstart")
    shown = load_config(tmp_path / "readme.yaml").model_dump(mode="json")
    shipped = load_config(ROOT / "configs" / "quickstart.yaml").model_dump(mode="json")
    moved = json.loads(json.dumps(shown).replace(str(tmp_path), str(ROOT / "configs")))
    limits = [config["calibration"].pop("calib_max_seq_length") for config in (moved, shipped)]
    assert moved == shipped
    tokenizer = load_tokenizer(ROOT / "configs" / "quickstart" / "target")
    rows = [
        json.loads(line)
        for name in ("calib", "heldout")
        for line in (ROOT / f"configs/quickstart/data/{name}.jsonl").read_text().splitlines()
    ]
    longest = max(len(tokenizer.encode(row["text"]).ids) for row in rows)
    assert longest == min(limits)
