//! Instructions of the hot paths, compared with a committed list. A loaded machine makes a path
//! slow, but not longer: so a loss of a few per cent shows.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The committed counts: a line for each path, with its name and its number of instructions.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/counts.txt");

/// The hot paths: the names that `protocols/examples/counts.rs` knows.
const PATHS: [&str; 5] = ["carousel", "deterministic", "ocean-vista", "store", "wire"];

/// By how much a count may exceed the committed one, in per cent. Repeated runs of one build differ
/// by less than a thousandth. A path with much formatting differs by some per cent between versions
/// of the C library.
const TOLERANCE: u64 = 3;

/// The counts by the names of the paths.
type Counts = BTreeMap<String, u64>;

/// Counts every path of the list with `program`, prints the counts, and compares them; or writes
/// them to the list.
pub fn run(program: &Path, update: bool) -> Result<()> {
    let text = std::fs::read_to_string(FILE).with_context(|| format!("could not read {FILE}"))?;
    let known = parse(&text)?;
    let mut counts = Counts::new();
    for path in PATHS {
        let count = count(program, path)?;
        match known.get(path) {
            Some(known) => eprintln!("{}", line(path, *known, count)),
            None => eprintln!("{path}: {} instructions", grouped(count)),
        }
        counts.insert(path.to_owned(), count);
    }
    if update {
        return std::fs::write(FILE, render(&text, &counts))
            .with_context(|| format!("could not write {FILE}"));
    }
    compare(&known, &counts)
}

/// The instructions that one path takes.
fn count(program: &Path, path: &str) -> Result<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]);
    let output = match valgrind.arg(program).arg(path).output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(
            "valgrind is not installed, and instructions cannot be counted without it. Install it (on \
             Debian: apt-get install valgrind), or run `cargo xtask bench`, which measures time"
        ),
        Err(error) => return Err(error).context("could not start valgrind"),
    };
    let report = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{path} ended with {}:\n{report}", output.status);
    eprint!("{path}: {}", String::from_utf8_lossy(&output.stdout));
    instructions(&report).with_context(|| format!("{path}: valgrind reported no count:\n{report}"))
}

/// The number in the line `==123== I   refs:      1,234,567`.
fn instructions(report: &str) -> Option<u64> {
    let line = report.lines().find(|line| line.contains("refs:"))?;
    let (_, number) = line.split_once("refs:")?;
    number.split_whitespace().next()?.replace(',', "").parse().ok()
}

/// Reads the list. Lines that begin with `#` are comments.
fn parse(text: &str) -> Result<Counts> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .filter(|(_, line)| !line.starts_with('#'))
        .map(|(at, line)| {
            let parts = line.split_whitespace().collect::<Vec<_>>();
            let [path, count] = parts.as_slice() else {
                bail!("{FILE}:{}: expected a name and a number, found {line:?}", at + 1)
            };
            let count = count.replace('_', "");
            let count = count.parse().with_context(|| format!("{FILE}:{}: {line:?}", at + 1))?;
            Ok(((*path).to_owned(), count))
        })
        .collect()
}

/// The list with new counts and the comments of the old one.
fn render(old: &str, counts: &Counts) -> String {
    let comments = old.lines().filter(|line| line.starts_with('#')).map(str::to_owned);
    let lines = counts.iter().map(|(path, count)| format!("{path} {}", grouped(*count)));
    comments.chain(lines).map(|line| line + "\n").collect()
}

/// A number with an underscore between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let ends = (0..digits.len()).map(|at| (digits.len() - at).is_multiple_of(3) && at > 0);
    let grouped = digits.chars().zip(ends);
    grouped.flat_map(|(digit, new)| new.then_some('_').into_iter().chain([digit])).collect()
}

/// One line of the result.
fn line(path: &str, known: u64, count: u64) -> String {
    let permille = (i128::from(count) - i128::from(known)) * 1_000 / i128::from(known.max(1));
    let sign = if permille < 0 { '-' } else { '+' };
    let (whole, tenth) = (permille.abs() / 10, permille.abs() % 10);
    let (now, before) = (grouped(count), grouped(known));
    format!("{path}: {now} instructions, {sign}{whole}.{tenth} % of {before}")
}

/// Fails if a path takes more instructions than it may.
fn compare(known: &Counts, counts: &Counts) -> Result<()> {
    if let Some(path) = counts.keys().find(|path| !known.contains_key(*path)) {
        bail!("{FILE} has no count of {path}; write it with `cargo xtask bench --counts --update`");
    }
    let of = |path| counts.get(path).copied().unwrap_or(u64::MAX);
    let allowed = |known: u64| known.saturating_add(known / 100 * TOLERANCE);
    let losses: Vec<String> = known
        .iter()
        .filter(|(path, known)| of(*path) > allowed(**known))
        .map(|(path, known)| line(path, *known, of(path)))
        .collect();
    ensure!(
        losses.is_empty(),
        "more than {TOLERANCE} % more instructions than {FILE} says:\n  {}\nIf the change is worth it, say so \
         in the commit and write the new counts with `cargo xtask bench --counts --update`",
        losses.join("\n  ")
    );
    if known.iter().any(|(path, known)| of(path) < known - known / 100 * TOLERANCE) {
        eprintln!(
            "A path takes less than before: `cargo xtask bench --counts --update` keeps that."
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

    use super::*;

    #[test]
    fn a_report_of_valgrind_is_read() {
        let report = "==7== Cachegrind\n==7== \n==7== I   refs:      2,814,970,373\n";
        assert_eq!(instructions(report), Some(2_814_970_373));
        assert_eq!(instructions("==7== Cachegrind, a profiler"), None);
    }

    #[test]
    fn a_list_is_written_as_it_is_read() {
        let text = "# why\nstore 1_234\nwire 5\n";
        let counts = parse(text).unwrap();
        assert_eq!(counts, Counts::from([("store".into(), 1_234), ("wire".into(), 5)]));
        assert_eq!(render(text, &counts), text);
        assert_eq!(
            ["0", "999", "1_000", "12_345_678"],
            [0, 999, 1_000, 12_345_678].map(grouped)[..]
        );
        let error = format!("{:#}", parse("# why\nstore\n").unwrap_err());
        assert!(error.contains("counts.txt:2"), "{error}");
    }

    #[test]
    fn a_loss_above_the_tolerance_fails_and_is_named() {
        let of = |store, wire| Counts::from([("store".into(), store), ("wire".into(), wire)]);
        let known = of(100_000, 100_000);
        compare(&known, &of(103_000, 50_000)).unwrap();
        let error = format!("{:#}", compare(&known, &of(103_001, 100_000)).unwrap_err());
        assert!(error.contains("store: 103_001") && !error.contains("wire:"), "{error}");
        assert!(error.contains("--update") && error.contains("+3.0 %"), "{error}");
    }

    #[test]
    fn a_path_without_a_count_is_an_error() {
        let counts = Counts::from([("store".into(), 5), ("wire".into(), 5)]);
        let error = compare(&Counts::from([("wire".into(), 5)]), &counts).unwrap_err();
        assert!(error.to_string().contains("no count of store"), "{error}");
    }

    #[test]
    fn the_committed_list_can_be_read() {
        let known = parse(&std::fs::read_to_string(FILE).unwrap()).unwrap();
        assert!(known.keys().all(|path| PATHS.contains(&path.as_str())), "{known:?}");
    }
}
