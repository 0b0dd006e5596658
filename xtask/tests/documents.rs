//! Checks statements of the repository about itself.

#![allow(clippy::unwrap_used, clippy::disallowed_types)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// The files below `folder` whose names end in `.extension`.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
}

/// The pages that define codes.
const PAGES: [&str; 2] = ["pitfalls.md", "reliability.md"];

/// Words of one capital letter and one or two digits, such as C8, V12 or G1a, outside of `code`. A
/// section number such as VII-A3 is one word and no code.
fn codes(text: &str) -> impl Iterator<Item = &str> {
    let prose = text.split('`').step_by(2);
    let words = prose.flat_map(|part| {
        part.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-' && c != '.')
    });
    words.map(|word| word.trim_end_matches(['.', '-'])).filter(|word| {
        let Some(rest) = word.strip_prefix(|letter: char| letter.is_ascii_uppercase()) else {
            return false;
        };
        let variant = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        let digits = rest.len() - variant.len();
        (1..=2).contains(&digits)
            && variant.len() <= 1
            && variant.bytes().all(|byte| byte.is_ascii_lowercase())
    })
}

/// The codes that the pages define: the first cells of their tables. None is defined twice.
fn defined() -> BTreeSet<String> {
    let mut known = BTreeSet::new();
    for page in PAGES {
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        let cells = text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
        for code in cells.filter(|cell| codes(cell).next() == Some(*cell)) {
            assert!(known.insert(code.to_owned()), "docs/{page}: {code} is defined a second time");
        }
    }
    known
}

/// Names of figures in papers: their files below `experiments`.
fn figures() -> BTreeSet<String> {
    let mut found = Vec::new();
    files(&root().join("experiments"), "toml", &mut found);
    found.iter().map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

/// The comment of each line of Rust, if it has one. A quote before the slashes means a string.
fn comments(rust: &str) -> impl Iterator<Item = (usize, &str)> {
    rust.lines().enumerate().filter_map(|(index, line)| {
        let (code, comment) = line.split_once("//")?;
        (code.matches('"').count() % 2 == 0).then_some((index + 1, comment))
    })
}

/// The prose of each line of a page, without fenced blocks.
fn prose(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_fenced = false;
    page.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        (!is_fence && !is_fenced).then_some((index + 1, line))
    })
}

/// Pages that people write. `docs/reproduction.md` is written by the program.
fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root().join("docs"), "md", &mut found);
    found.retain(|page| !page.ends_with("docs/reproduction.md"));
    found.extend(["README.md", "CHANGELOG.md"].map(|name| root().join(name)));
    found.sort();
    found
}

/// The codes in `lines` that are not in `known`, with file and line.
fn undefined<'t>(
    file: &Path,
    lines: impl Iterator<Item = (usize, &'t str)>,
    known: &BTreeSet<String>,
) -> (usize, Vec<String>) {
    let mut cited = 0;
    let mut unknown = Vec::new();
    for (number, line) in lines {
        for code in codes(line) {
            cited += 1;
            if !known.contains(code) {
                unknown.push(format!("{}:{number}: {code}", file.display()));
            }
        }
    }
    (cited, unknown)
}

#[test]
fn every_code_in_a_comment_is_defined() {
    let known = defined();
    let mut sources = Vec::new();
    for name in ALL {
        files(&root().join(name), "rs", &mut sources);
    }
    let mut cited = 0;
    let mut unknown = Vec::new();
    for file in &sources {
        let text = fs::read_to_string(file).unwrap();
        let mut known = known.clone();
        // The crate that repeats figures of papers names them.
        if file.starts_with(root().join("cli/src/reproduce")) {
            known.extend(figures());
        }
        let (more, missing) = undefined(file, comments(&text), &known);
        cited += more;
        unknown.extend(missing);
    }
    assert!(cited > 300, "only {cited} citations found: is the search broken?");
    assert!(
        unknown.is_empty(),
        "define these in docs/pitfalls.md or docs/reliability.md:\n{}",
        unknown.join("\n")
    );
}

#[test]
fn every_code_in_a_page_is_defined() {
    let known = &defined() | &figures();
    let mut cited = 0;
    let mut unknown = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let (more, missing) = undefined(&page, prose(&text), &known);
        cited += more;
        unknown.extend(missing);
    }
    assert!(cited > 300, "only {cited} citations found: is the search broken?");
    assert!(
        unknown.is_empty(),
        "neither a code of docs/pitfalls.md or docs/reliability.md nor a figure of experiments/:\n{}",
        unknown.join("\n")
    );
}

#[test]
fn a_code_that_no_page_defines_is_found_with_its_line() {
    let known = BTreeSet::from(["C8".to_owned(), "G1a".to_owned()]);
    let rust =
        "// C8, G1a and `C9` are fine, and §VII-A3.\nlet x = 1; // (X7)\n\"//C7\"\n/// C81b, C8.";
    let (cited, unknown) = undefined(Path::new("a.rs"), comments(rust), &known);
    assert_eq!(unknown, ["a.rs:2: X7", "a.rs:4: C81b"]);
    assert_eq!(cited, 5);
    let page = "C8\n```\nX7\n```\nQ2";
    assert_eq!(undefined(Path::new("a.md"), prose(page), &known).1, ["a.md:5: Q2"]);
}

/// Long lines hide the change of a single word. Titles, tables, fenced blocks, and lines without a
/// space may be longer.
#[test]
fn prose_has_at_most_100_columns() {
    let mut long = Vec::new();
    // The page of defects is a table, except for a few lines above it.
    for page in pages().into_iter().filter(|page| !page.ends_with("docs/defects.md")) {
        let text = fs::read_to_string(&page).unwrap();
        for (number, line) in prose(&text).filter(|(_, line)| !line.starts_with(['|', '#'])) {
            // A line cannot be broken inside backticks, or inside the target of a link.
            let mut is_code = false;
            let can_break = line.trim().chars().enumerate().any(|(at, c)| {
                is_code ^= c == '`';
                c == ' ' && !is_code && at > 3
            });
            if line.chars().count() > 100 && can_break {
                long.push(format!("{}:{number}", page.display()));
            }
        }
    }
    assert!(long.is_empty(), "more than 100 columns:\n{}", long.join("\n"));
}

/// Every crate's folder: tests are below `src` and `tests`.
const ALL: [&str; 14] = [
    "cli",
    "client",
    "core",
    "eval",
    "geotp",
    "lab",
    "lua",
    "middleware",
    "model",
    "proto",
    "protocols",
    "server",
    "sim",
    "xtask",
];

/// Names of test functions and of golden traces. A function counts if it has `#[test]`,
/// `#[tokio::test]` or another attribute that ends in `test`.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for name in ALL {
        let (mut sources, mut texts) = (Vec::new(), Vec::new());
        files(&root().join(name), "rs", &mut sources);
        files(&root().join(name), "txt", &mut texts);
        for source in sources {
            let text = fs::read_to_string(source).unwrap();
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                let Some(attribute) = line.strip_prefix("#[") else {
                    let function = line.strip_prefix("async ").unwrap_or(line);
                    if let Some(rest) = function.strip_prefix("fn ").filter(|_| is_test) {
                        names.insert(rest.split(['(', '<']).next().unwrap().to_owned());
                    }
                    is_test &= line.starts_with("//") || line.is_empty();
                    continue;
                };
                let path = attribute.split(['(', ']']).next().unwrap();
                is_test |= path == "test" || path.ends_with("::test");
            }
        }
        let golden = texts.iter().filter(|path| {
            path.ancestors()
                .any(|folder| folder.ends_with("testdata") || folder.ends_with("golden"))
        });
        names.extend(golden.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()));
    }
    names
}

/// A row names the test that detects the defect, or says `none` or `open`.
#[test]
fn every_test_named_in_the_table_of_defects_exists() {
    let known = tests();
    let text = fs::read_to_string(root().join("docs/defects.md")).unwrap();
    let mut named = 0;
    let mut wrong = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let is_head = line.starts_with("| defect ") || line.starts_with("|---");
        if !line.starts_with('|') || is_head {
            continue;
        }
        let mut complain =
            |what: &str| wrong.push(format!("docs/defects.md:{}: {what}", index + 1));
        let [_, fixed, _, _, held] = cells[..] else {
            complain(&format!("{} cells, not 5", cells.len()));
            continue;
        };
        let tests: Vec<&str> = held.split('`').skip(1).step_by(2).collect();
        named += tests.len();
        for test in tests.iter().filter(|test| !known.contains(**test)) {
            complain(&format!("there is no test {test:?}"));
        }
        if tests.is_empty() && !held.starts_with("none") && held != "open" {
            complain("the last cell names no test, and is neither `none` nor `open`");
        }
        if fixed.contains("open") != (held == "open") {
            complain("open in one of two cells only");
        }
    }
    assert!(named > 100, "only {named} tests are named: is the search broken?");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The number of a decision, from the name of its page.
fn number(page: &Path) -> Option<usize> {
    page.file_name()?.to_str()?.split_once('-')?.0.parse().ok()
}

#[test]
fn decisions_are_numbered_without_holes_and_listed() {
    let folder = root().join("docs/adr");
    let mut decisions = Vec::new();
    files(&folder, "md", &mut decisions);
    decisions.retain(|page| !page.ends_with("README.md"));
    decisions.sort();
    let index = fs::read_to_string(folder.join("README.md")).unwrap();
    for (at, page) in decisions.iter().enumerate() {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert_eq!(number(page), Some(at + 1), "docs/adr/{name} has not the next number");
        let text = fs::read_to_string(page).unwrap();
        let title = text.lines().next().unwrap().strip_prefix(&format!("# {}. ", at + 1));
        let title = title.unwrap_or_else(|| panic!("docs/adr/{name}: no title with its number"));
        let row = format!("| {} | [{title}]({name}) |", at + 1);
        assert!(index.contains(&row), "docs/adr/README.md lacks this row: {row}");
    }
    let rows = index.lines().filter(|line| line.contains("](0")).count();
    assert_eq!(rows, decisions.len(), "docs/adr/README.md has a row too many");

    let mut cited = 0;
    let mut sources = Vec::new();
    for name in ALL {
        files(&root().join(name), "rs", &mut sources);
    }
    for file in sources.into_iter().chain(pages()) {
        let text = fs::read_to_string(&file).unwrap();
        // A line may break between the word and its number.
        let words: Vec<&str> = text.split_whitespace().collect();
        for (word, next) in words.iter().zip(words.iter().skip(1)) {
            if !word.ends_with("ADR") {
                continue;
            }
            let digits: String = next.chars().take_while(char::is_ascii_digit).collect();
            let Ok(number) = digits.parse::<usize>() else { continue };
            cited += 1;
            assert!(
                (1..=decisions.len()).contains(&number),
                "{}: there is no ADR {number}",
                file.display()
            );
        }
    }
    assert!(cited > 20, "only {cited} citations found: is the search broken?");
}

/// The anchors of a page's titles, as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let titles = prose(page).filter_map(|(_, line)| line.strip_prefix('#'));
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    titles
        .map(|title| title.trim_start_matches('#').trim().to_lowercase())
        .map(|title| title.chars().filter(kept).collect::<String>().replace(' ', "-"))
        .collect()
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut followed = 0;
    let mut broken = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let lines: Vec<&str> = prose(&text).map(|(_, line)| line).collect();
        let joined = lines.join("\n");
        for target in joined.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") {
                continue;
            }
            followed += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let to = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let is_there = match anchor {
                "" => to.exists(),
                anchor => fs::read_to_string(&to).is_ok_and(|text| anchors(&text).contains(anchor)),
            };
            if !is_there {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(followed > 100, "only {followed} links found: is the search broken?");
    assert!(broken.is_empty(), "links to nowhere:\n{}", broken.join("\n"));
}
