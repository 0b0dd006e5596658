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

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
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
    let mut files = Vec::new();
    for name in CRATES {
        sources(&root().join(name), &mut files);
    }
    let mut cited = 0;
    let mut unknown = Vec::new();
    for file in &files {
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
