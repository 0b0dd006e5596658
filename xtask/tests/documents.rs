//! What the repository says about itself is true.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Where comments cite pitfalls. In others a code may be an anomaly or a
/// figure of a paper.
const CRATES: [&str; 6] = ["core", "protocols", "sim", "lab", "geotp", "server"];

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

/// Words like `C8` and `V12`: one of the letters, then one or two digits, the first not 0.
fn codes<'t>(text: &'t str, letters: &'t str) -> impl Iterator<Item = &'t str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-');
    words.filter(move |word| {
        let Some(digits) = word.strip_prefix(|letter| letters.contains(letter)) else {
            return false;
        };
        (1..=2).contains(&digits.len())
            && !digits.starts_with('0')
            && digits.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// The codes that a page defines: the first cells of its tables.
fn defined(page: &str, letters: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
    let cells = text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    cells.flat_map(|cell| codes(cell, letters)).map(str::to_owned).collect()
}

#[test]
fn every_pitfall_cited_in_a_comment_is_defined() {
    let known = defined("pitfalls.md", "RCNVSTG");
    let mut sources = Vec::new();
    for name in CRATES {
        files(&root().join(name), "rs", &mut sources);
    }
    let mut cited = 0;
    let mut unknown = Vec::new();
    for file in &sources {
        let text = fs::read_to_string(file).unwrap();
        for (index, line) in text.lines().enumerate() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            for code in codes(comment, "RCNVSTG") {
                cited += 1;
                if !known.contains(code) {
                    unknown.push(format!("{}:{}: {code}", file.display(), index + 1));
                }
            }
        }
    }
    assert!(cited > 100, "only {cited} citations found: is the search broken?");
    assert!(unknown.is_empty(), "not in docs/pitfalls.md:\n{}", unknown.join("\n"));
}

/// Every crate's folder: tests are below `src` and `tests`.
const ALL: [&str; 11] = [
    "cli",
    "client",
    "core",
    "eval",
    "geotp",
    "lab",
    "proto",
    "protocols",
    "server",
    "sim",
    "xtask",
];

/// Names of test functions and of golden traces. A function counts if `#[test]`, `#[tokio::test]` or
/// another attribute that ends in `test` stands above it.
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

/// A row says which test holds it, or `none`, or `open`.
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
