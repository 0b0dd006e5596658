//! The objective of a plan.

use std::fmt::{self, Display};
use std::str::FromStr;

use orthodrome_eval::metrics::Summary;

use super::search::Run;

/// The transactions whose latency counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Whose {
    All,
    High,
    Low,
}

/// A figure of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Figure {
    Mean,
    P50,
    P95,
    P99,
}

/// The objective of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Objective {
    /// The lowest latency.
    Latency(LatencyOf),
    /// The highest number of committed transactions a second.
    Throughput,
    /// The fewest bytes between regions for each transaction; or the lowest cost, if bytes have
    /// prices.
    Egress,
}

/// A figure of the latencies of some transactions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LatencyOf(Figure, Whose);

/// The names of objectives, for messages.
pub const NAMES: &str = "mean, p50, p95 or p99, each also with -high or -low; throughput; egress";

impl FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "throughput" => return Ok(Self::Throughput),
            "egress" => return Ok(Self::Egress),
            _ => {}
        }
        let (figure, whose) = text.split_once('-').map_or((text, ""), |(a, b)| (a, b));
        let figure = match figure {
            "mean" => Figure::Mean,
            "p50" => Figure::P50,
            "p95" => Figure::P95,
            "p99" => Figure::P99,
            _ => return Err(format!("{text:?} is not an objective; use {NAMES}")),
        };
        let whose = match whose {
            "" if !text.contains('-') => Whose::All,
            "high" => Whose::High,
            "low" => Whose::Low,
            _ => return Err(format!("{text:?} is not an objective; use {NAMES}")),
        };
        Ok(Self::Latency(LatencyOf(figure, whose)))
    }
}

impl Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Latency(LatencyOf(figure, whose)) = self else {
            return f.write_str(if *self == Self::Egress { "egress" } else { "throughput" });
        };
        f.write_str(match figure {
            Figure::Mean => "mean",
            Figure::P50 => "p50",
            Figure::P95 => "p95",
            Figure::P99 => "p99",
        })?;
        f.write_str(match whose {
            Whose::All => "",
            Whose::High => "-high",
            Whose::Low => "-low",
        })
    }
}

impl Objective {
    /// The mean latency of all transactions.
    pub const MEAN: Self = Self::Latency(LatencyOf(Figure::Mean, Whose::All));

    /// The unit of the figure. `is_priced`: bytes between regions have prices.
    pub fn unit(self, is_priced: bool) -> &'static str {
        match self {
            Self::Egress if is_priced => "dollars per million transactions",
            Self::Latency(_) => "ms",
            Self::Throughput => "committed/s",
            Self::Egress => "bytes between regions per transaction",
        }
    }

    /// The figure of one run; NaN if no transaction ended that counts.
    pub fn of(self, run: &Run) -> f64 {
        match self {
            Self::Throughput => run.result.committed_tps,
            Self::Egress => run.egress_dollars.unwrap_or(run.egress_bytes_per_txn),
            Self::Latency(LatencyOf(figure, whose)) => {
                let latencies = &run.result.latency_ms;
                let Summary { n, mean, p50, p95, p99, .. } = match whose {
                    Whose::All => &latencies.all,
                    Whose::High => &latencies.high,
                    Whose::Low => &latencies.low,
                };
                match figure {
                    _ if *n == 0 => f64::NAN,
                    Figure::Mean => *mean,
                    Figure::P50 => *p50,
                    Figure::P95 => *p95,
                    Figure::P99 => *p99,
                }
            }
        }
    }

    /// The mean of the figure over runs.
    pub fn mean(self, runs: &[Run]) -> f64 {
        runs.iter().map(|run| self.of(run)).sum::<f64>() / runs.len() as f64
    }

    /// The value to minimize: infinite for runs that cannot be recommended.
    pub fn cost(self, runs: &[Run]) -> f64 {
        let mean = self.mean(runs);
        if mean.is_nan() || runs.iter().any(|run| run.fault().is_some()) {
            return f64::INFINITY;
        }
        if self == Self::Throughput { -mean } else { mean }
    }

    /// How many times better `a` is than `b`.
    pub fn ratio(self, a: &[Run], b: &[Run]) -> f64 {
        let (a, b) = (self.mean(a), self.mean(b));
        if self == Self::Throughput { a / b } else { b / a }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_are_named_as_they_are_written() {
        for text in ["p95-high", "p50", "mean-low", "p99", "throughput", "egress"] {
            assert_eq!(text.parse::<Objective>().unwrap().to_string(), text);
        }
        for text in ["p90", "p95-", "p95-mid", "high", ""] {
            let problem = text.parse::<Objective>().unwrap_err();
            assert!(problem.contains("p95"), "{problem}");
        }
    }
}
