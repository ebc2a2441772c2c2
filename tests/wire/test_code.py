"""Code that travels by reference: importing files and finding definitions in them."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tokenflow.wire.code import ImportFailed, failure, find, import_file, importing, keywords, place


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "code.py"


def refusal(file: Path) -> ImportFailed:
    before = set(sys.modules)
    with pytest.raises(ImportFailed) as caught:
        import_file(str(file))
    assert {name for name in set(sys.modules) - before if name.startswith("tokenflow_recipe")} == set()
    return caught.value


def test_a_file_is_imported_once_as_long_as_its_text_stays(file: Path) -> None:
    file.write_text("value = []\n")
    first = import_file(str(file))
    first.value.append(1)
    assert import_file(str(file)) is first
    assert sys.modules[first.__name__] is first
    assert first.__file__ == str(file)
    file.write_text("value = 2\n")
    assert import_file(str(file)).value == 2
    assert first.value == [1]


def test_what_a_file_held_is_imported_whatever_it_holds_now(file: Path) -> None:
    for now in (b"value = 2\n", b"raise SystemExit\n", None):
        file.unlink(missing_ok=True) if now is None else file.write_bytes(now)
        assert find(str(file), "value", b"value = 1\n") == 1
    file.write_bytes(b"value = 1\n")
    assert import_file(str(file), b"value = 1\n") is import_file(str(file))


def test_the_same_text_in_two_files_makes_two_modules(file: Path, tmp_path: Path) -> None:
    file.write_text("value = 1\n")
    twin = tmp_path / "twin.py"
    twin.write_text("value = 1\n")
    assert import_file(str(file)) is not import_file(str(twin))


def test_a_file_is_found_under_a_relative_name_and_a_link(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("value = 1\n")
    (tmp_path / "link.py").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    assert import_file("code.py") is import_file(str(file)) is import_file("link.py")


def test_functions_classes_and_methods_are_found_by_qualified_name(file: Path) -> None:
    file.write_text("class A:\n    def f(self):\n        return 1\n\ndef g():\n    return 2\n")
    assert find(str(file), "A")().f() == 1
    assert find(str(file), "A.f").__qualname__ == "A.f"
    assert find(str(file), "g")() == 2


def test_a_name_that_is_not_there_is_named(file: Path) -> None:
    file.write_text("class A:\n    pass\n")
    for name in ("b", "A.b", "A.b.c"):
        with pytest.raises(ImportFailed) as caught:
            find(str(file), name)
        assert str(caught.value) == f"{file}: has no {name!r} at its top level"


def test_dataclasses_and_annotations_work_in_an_imported_file(file: Path) -> None:
    file.write_text(
        "from __future__ import annotations\nimport dataclasses, typing\n"
        "@dataclasses.dataclass\nclass A:\n    x: int = 3\n"
        "hints = typing.get_type_hints(A)\n"
    )
    module = import_file(str(file))
    assert (module.A().x, module.hints) == (3, {"x": int})


def test_this_modules_future_imports_do_not_leak_into_the_file(file: Path) -> None:
    file.write_text("def f(x: 1 + 1): pass\nvalue = f.__annotations__['x']\n")
    assert import_file(str(file)).value == 2


def test_a_missing_file_and_a_folder_cannot_be_read(file: Path, tmp_path: Path) -> None:
    assert str(refusal(file)) == f"{file}: cannot be read: No such file or directory"
    assert str(refusal(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (b"x = (\n", 1, 5, "not Python: '(' was never closed"),
        (b"x = 1\ndef f(:\n", 2, 7, "not Python: invalid syntax"),
        (b"f(a=1, 2)\n", 1, 9, "not Python: positional argument follows keyword argument"),
    ],
)
def test_a_syntax_error_has_line_and_column(
    file: Path, text: bytes, line: int, column: int, message: str
) -> None:
    file.write_bytes(text)
    error = refusal(file)
    assert (error.line, error.column, error.message) == (line, column, message)


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"a\x00b\n", b"-" * 100_000 + b"1\n"])
def test_what_no_parser_takes_is_not_python(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    assert refusal(file).message.startswith("not Python: ")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\ny = 1 / 0\n", 2, "raised ZeroDivisionError: division by zero"),
        ("def f():\n    raise ValueError('no')\n\n\nf()\n", 2, "raised ValueError: no"),
        ("\nraise SystemExit(3)\n", 2, "raised SystemExit: 3"),
        ("assert False\n", 1, "raised AssertionError"),
        ("raise ValueError('on\\nlines')\n", 1, "raised ValueError: on lines"),
        (f"raise ValueError({'x' * 600!r})\n", 1, f"raised ValueError: {'x' * 500}..."),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n", 3, "raised E"),
        ("import json\njson.loads('{')\n", 2, "raised JSONDecodeError: Expecting property name"),
        ("import no_such_module\n", 1, "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("from tokenflow import Nothing\n", 1, "raised ImportError: cannot import name 'Nothing'"),
    ],
)
def test_a_file_that_raises_is_reported_with_its_own_line(
    file: Path, text: str, line: int, message: str
) -> None:
    file.write_text(text)
    error = refusal(file)
    assert (error.line, error.column) == (line, 0)
    assert error.message.startswith(message)
    assert str(error).startswith(f"{file}:{line}: {message}")


@pytest.mark.parametrize("beside", ["other.py", "other"])
def test_a_module_beside_the_file_is_not_imported_and_the_error_says_why(file: Path, beside: str) -> None:
    made = file.parent / beside
    made.write_text("") if made.suffix else made.mkdir()
    file.write_text("import other.thing\n")
    assert refusal(file).message == (
        "raised ModuleNotFoundError: No module named 'other' (the file's folder is not searched: install the "
        "module, or put it into the file)"
    )


def test_a_failed_import_is_tried_anew(file: Path) -> None:
    file.write_text("import builtins\nvalue = builtins.not_yet\n")
    refusal(file)
    file.write_text("value = 1\n")
    assert import_file(str(file)).value == 1


def test_the_file_that_is_being_imported_is_known(file: Path) -> None:
    text = "from tokenflow.wire.code import importing\nseen = importing()\n"
    file.write_text(text)
    assert importing() == ""
    assert import_file(str(file)).seen == str(file)
    assert importing() == ""
    file.write_text(text + "1 / 0\n")
    refusal(file)
    assert importing() == ""


def test_what_a_file_prints_goes_to_standard_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("print('hello')\n")
    import_file(str(file))
    assert capsys.readouterr() == ("", "hello\n")


def test_an_import_inside_an_import_knows_its_own_file(file: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text("from tokenflow.wire.code import importing\nseen = importing()\n")
    file.write_text(
        "from tokenflow.wire.code import import_file, importing\n"
        f"inner = import_file({str(inner)!r}).seen\nouter = importing()\n"
    )
    module = import_file(str(file))
    assert (module.inner, module.outer) == (str(inner), str(file))


def plain(result: object, tau: float, eta: float = 0.0, *, top: float = 1.0) -> None: ...


def takes_all(result: object, **params: float) -> None: ...


def test_a_function_gets_the_names_that_it_asks_for() -> None:
    assert keywords(plain, ["eta", "other", "tau", "result"]) == ("eta", "tau")
    assert keywords(plain, ["top"]) == ("top",)
    assert keywords(takes_all, ["b", "result", "a"]) == ("b", "a")


def wrapped(function: object) -> object:
    return functools.wraps(function)(lambda *arguments: None)  # type: ignore[arg-type]


class Thing:
    def method(self) -> None: ...


def test_a_place_names_a_function_its_file_and_its_line() -> None:
    here = f"{__file__}:{plain.__code__.co_firstlineno}"
    assert place(plain) == f"plain, {here}"
    assert place(wrapped(plain)) == f"plain, {here}"  # type: ignore[arg-type]
    assert place(Thing.method).startswith(f"Thing.method, {__file__}:")
    assert place(Thing().method).startswith(f"Thing.method, {__file__}:")
    assert place(len) == "len"


def test_a_failure_says_what_was_raised_where(file: Path) -> None:
    file.write_text("def f(x):\n    g(x)\n\ndef g(x):\n    return {}[x]\n\ndef h(x):\n    assert x\n")
    module = import_file(str(file))
    for name, given, text in [
        ("f", "key", "raised KeyError at line 5: 'key'"),
        ("h", 0, "raised AssertionError at line 8"),
    ]:
        with pytest.raises((KeyError, AssertionError)) as caught:
            getattr(module, name)(given)
        assert failure(caught.value, str(file)) == text
        assert " at line " not in failure(caught.value, "elsewhere.py")


def test_importing_code_loads_no_torch(file: Path) -> None:
    file.write_text("value = 1\n")
    code = (
        f"import sys\nfrom tokenflow.wire.code import import_file\nimport_file({str(file)!r})\n"
        "assert not {'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
