//! Output: results go to standard output, everything else to standard error.

use std::fmt;
use std::io::{self, Write as _};
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// The commit this binary was built from; `unknown` outside of a git checkout.
pub const COMMIT: &str = env!("ORTHODROME_COMMIT");

/// Version and commit.
pub const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("ORTHODROME_COMMIT"), ")");

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output: {0}")]
pub struct StdoutError(pub io::Error);

/// Prints a readable result, and adds a line break if it has none at its end.
pub fn print(text: &str) -> Result<(), StdoutError> {
    let mut stdout = io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    write!(stdout, "{text}{end}").and_then(|()| stdout.flush()).map_err(StdoutError)
}

/// Prints to standard error and ignores errors; use `note!`.
pub fn note(text: fmt::Arguments<'_>) {
    // The reader of standard error may have closed it.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints a machine-readable result: one JSON object on one line.
pub fn print_json(result: &impl Serialize) -> anyhow::Result<()> {
    Ok(print(&serde_json::to_string(result)?)?)
}

/// A table: the first column is left-aligned, figures are right-aligned.
pub fn table<R, C>(header: &[&str], rows: R) -> Table
where
    R: IntoIterator<Item = C>,
    C: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A progress bar on standard error, visible only on a terminal. With a `length` it shows the
/// completed share, otherwise only activity.
pub fn progress(length: Option<u64>, template: &str) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(template)?);
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(bar)
}

/// A count with its digits in groups of three.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped
}

/// A time span for people: its two largest units.
pub fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// `part` of `whole` in per cent; `-` if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    format!("{:.1} %", part as f64 * 100.0 / whole as f64)
}

/// The share of attempts that must commit, or a run deserves a warning.
const COMMIT_RATE_MIN: f64 = 0.1;
/// The number of attempts that say something about the rate.
const ATTEMPTS_MIN: u64 = 100;

/// A warning if nearly all attempts aborted: then most figures say more about the load than about
/// the protocol.
pub fn few_commits(committed: u64, aborted: u64) -> Option<String> {
    let attempts = committed + aborted;
    let is_rare = (committed as f64) < COMMIT_RATE_MIN * attempts as f64;
    (attempts >= ATTEMPTS_MIN && is_rare).then(|| {
        format!(
            "warning: only {} of {} attempts committed: the transactions contend for too few records, or the cluster is \
             overloaded. Use fewer clients or a lower rate, a smaller --zipf, or a protocol in which contention aborts \
             nothing, such as geodesic",
            percent(committed, attempts),
            count(attempts)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, text) in [(0, "0"), (999, "999"), (1_000, "1 000"), (12_345_678, "12 345 678")]
        {
            assert_eq!(count(number), text);
        }
        assert_eq!(percent(1, 8), "12.5 %");
        assert_eq!(percent(0, 0), "-");
    }

    #[test]
    fn a_span_has_two_units() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min 0 s"),
            (3_599, "59 min 59 s"),
            (3_600, "1 h 0 min"),
            (86_399, "23 h 59 min"),
            (90_000, "1 d 1 h"),
        ] {
            assert_eq!(span(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_run_in_which_nearly_everything_aborts_is_warned_of() {
        assert!(few_commits(9, 91).is_some_and(|text| text.contains("only 9.0 % of 100 attempts")));
        assert_eq!(few_commits(10, 90), None);
        assert_eq!(few_commits(0, 99), None, "too few to say");
        assert_eq!(few_commits(0, 0), None);
    }
}
