//! Compares what the authors reported with what was measured.

use orthodrome_core::ordered::OrdMap;

use serde::Serialize;

use super::experiment::Claim;

/// The mean over seeds of one figure, by protocol and by the value of the option that varies.
#[derive(Default, Debug)]
pub struct Measured(OrdMap<String, Vec<(f64, f64)>>);

impl Measured {
    /// Records a figure unless it is NaN, which it is if no transaction ended.
    pub fn record(&mut self, protocol: &str, at: f64, figure: f64) {
        if figure.is_finite() {
            self.0.entry(protocol.to_owned()).or_default().push((at, figure));
        }
    }

    /// All figures of a protocol, in the order in which they were recorded.
    pub fn of(&self, protocol: &str) -> &[(f64, f64)] {
        self.0.get(protocol).map_or(&[], Vec::as_slice)
    }

    /// A figure, if there is one.
    pub fn at(&self, protocol: &str, at: f64) -> Option<f64> {
        self.of(protocol).iter().find(|(x, _)| *x == at).map(|(_, figure)| *figure)
    }
}

/// The verdict on a claim.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Agrees,
    /// The figure differs, and the experiment explains why.
    Explained,
    /// The figure differs, without an explanation.
    Differs,
    /// The figure that the claim is about was not run.
    NotRun,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Explained => "differs, explained",
            Self::Differs => "DIFFERS",
            Self::NotRun => "not run",
        }
    }
}

/// A claim with its verdict.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Judged {
    /// The reported value, as text.
    pub reported: String,
    /// The measured value, as text.
    pub measured: String,
    pub verdict: Verdict,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Judged {
    /// Compares a claim with what was measured.
    pub fn new(claim: &Claim, measured: &Measured) -> Self {
        let (mut reported, outcome) = judge(claim, measured);
        if let Some(column) = &claim.column {
            reported = format!("{column}, {reported}");
        }
        let (verdict, measured) = match outcome {
            None => (Verdict::NotRun, String::new()),
            Some((true, text)) => (Verdict::Agrees, text),
            Some((false, text)) if claim.why.is_some() => (Verdict::Explained, text),
            Some((false, text)) => (Verdict::Differs, text),
        };
        let why = claim.why.clone().filter(|_| verdict == Verdict::Explained);
        Self { reported, measured, verdict, why }
    }
}

/// The claim as text. If its figure was measured: whether the claim holds, and the measured value
/// as text.
fn judge(claim: &Claim, measured: &Measured) -> (String, Option<(bool, String)>) {
    let Claim { of, at, within, .. } = claim;
    let here = measured.at(of, *at);
    let compared = |expected: f64, found: f64, unit: &str| {
        let apart = (found - expected) / expected;
        let text = format!("{}{unit} ({:+.1} %)", short(found), apart * 100.0);
        (apart.abs() <= *within, text)
    };
    if let Some(expected) = claim.is {
        let text = format!("{of} at {at}: {}", short(expected));
        return (text, here.map(|found| compared(expected, found, "")));
    }
    if let Some(other) = &claim.like {
        let text = format!("{of} at {at}: like {other}");
        let pair = here.zip(measured.at(other, *at));
        return (
            text,
            pair.map(|(found, expected)| {
                let (holds, text) = compared(expected, found, "");
                (holds, format!("{text} of {}", short(expected)))
            }),
        );
    }
    if let Some(other) = &claim.lower_than {
        let pair = here.zip(measured.at(other, claim.than_at.unwrap_or(*at)));
        let other = match claim.than_at {
            Some(there) => format!("{other} at {there}"),
            None => other.clone(),
        };
        let text = match (claim.by, claim.times) {
            (Some(by), _) => format!("{of} at {at}: {} lower than {other}", short(by)),
            (None, Some(times)) => format!("{of} at {at}: {times}× lower than {other}"),
            (None, None) => format!("{of} at {at}: lower than {other}"),
        };
        let outcome = pair.map(|(found, expected)| match (claim.by, claim.times) {
            (Some(by), _) => compared(by, expected - found, " lower"),
            (None, Some(times)) => compared(times, expected / found, "×"),
            (None, None) => (found < expected, format!("{} and {}", short(found), short(expected))),
        });
        return (text, outcome);
    }
    let (found, of_what, percent) = match claim.growth_from {
        None => (here, String::new(), false),
        Some(from) => {
            let grown = here.zip(measured.at(of, from)).map(|(here, from)| here / from - 1.0);
            (grown, format!("growth over {from} "), true)
        }
    };
    let word = |value: f64| if percent { format!("{:.0} %", value * 100.0) } else { short(value) };
    let (side, limit) = match (claim.above, claim.below) {
        (Some(limit), _) => ("above", limit),
        (None, limit) => ("below", limit.unwrap_or(f64::INFINITY)),
    };
    let text = format!("{of} at {at}: {of_what}{side} {}", word(limit));
    let holds = |found: f64| if side == "above" { found > limit } else { found < limit };
    (text, found.map(|found| (holds(found), word(found))))
}

/// A figure with a suitable number of digits.
pub fn short(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(text: &str) -> Claim {
        toml::from_str(text).unwrap()
    }

    fn measured() -> Measured {
        let mut measured = Measured::default();
        for (name, at, figure) in [
            ("a", 1.0, 100.0),
            ("a", 2.0, 250.0),
            ("b", 1.0, 105.0),
            ("b", 2.0, 1_000.0),
            ("b", 4.0, f64::NAN),
        ] {
            measured.record(name, at, figure);
        }
        measured
    }

    #[test]
    fn claims_hold_or_do_not() {
        for (text, verdict, found) in [
            ("of = 'a'\nat = 1\nis = 95", Verdict::Agrees, "100 (+5.3 %)"),
            ("of = 'a'\nat = 1\nis = 80", Verdict::Differs, "100 (+25.0 %)"),
            ("of = 'a'\nat = 1\nis = 80\nwithin = 0.3", Verdict::Agrees, "100 (+25.0 %)"),
            ("of = 'a'\nat = 1\nis = 80\nwhy = 'so'", Verdict::Explained, "100 (+25.0 %)"),
            ("of = 'a'\nat = 2\nabove = 200", Verdict::Agrees, "250"),
            ("of = 'a'\nat = 2\nbelow = 200", Verdict::Differs, "250"),
            ("of = 'a'\nat = 1\nlike = 'b'", Verdict::Agrees, "100 (-4.8 %) of 105"),
            ("of = 'a'\nat = 2\nlike = 'b'", Verdict::Differs, "250 (-75.0 %) of 1000"),
            ("of = 'a'\nat = 2\nlower_than = 'b'", Verdict::Agrees, "250 and 1000"),
            ("of = 'b'\nat = 2\nlower_than = 'a'", Verdict::Differs, "1000 and 250"),
            ("of = 'a'\nat = 2\nlower_than = 'b'\ntimes = 4", Verdict::Agrees, "4.00× (+0.0 %)"),
            (
                "of = 'a'\nat = 2\nlower_than = 'b'\nby = 500",
                Verdict::Differs,
                "750 lower (+50.0 %)",
            ),
            ("of = 'a'\nat = 2\nlower_than = 'b'\nthan_at = 1", Verdict::Differs, "250 and 105"),
            ("of = 'a'\nat = 2\ngrowth_from = 1\nbelow = 2", Verdict::Agrees, "150 %"),
            ("of = 'b'\nat = 2\ngrowth_from = 1\nbelow = 2", Verdict::Differs, "852 %"),
            ("of = 'c'\nat = 2\nabove = 2", Verdict::NotRun, ""),
            ("of = 'b'\nat = 4\nbelow = 2", Verdict::NotRun, ""),
            ("of = 'a'\nat = 3\nis = 2\nwhy = 'so'", Verdict::NotRun, ""),
        ] {
            let judged = Judged::new(&claim(text), &measured());
            assert_eq!((judged.verdict, judged.measured.as_str()), (verdict, found), "{text}");
            assert_eq!(judged.why.is_some(), verdict == Verdict::Explained, "{text}");
        }
    }
}
