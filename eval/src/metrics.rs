//! Latency histograms, counters, and the published form of a run's result.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use orthodrome_core::id::{RegionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, nanos};
use orthodrome_core::txn::{AbortReason, Priority};

use crate::checker::Verdict;

/// A distribution of whole numbers, kept to three significant digits; its count, sum and maximum
/// are exact.
#[derive(Clone, Debug)]
pub struct Samples {
    histogram: Histogram<u64>,
    sum: u128,
    max: u64,
}

/// Three significant digits: quantiles are within 0.1 % of the truth.
const DIGITS: u8 = 3;

impl Default for Samples {
    fn default() -> Self {
        let Ok(histogram) = Histogram::new(DIGITS) else {
            unreachable!("a histogram can have from 0 to 5 digits")
        };
        Self { histogram, sum: 0, max: 0 }
    }
}

impl Samples {
    /// Adds one number.
    pub fn record(&mut self, value: u64) {
        let recorded = self.histogram.record(value);
        assert!(recorded.is_ok(), "a histogram that resizes itself can hold every number");
        self.sum += u128::from(value);
        self.max = self.max.max(value);
    }

    /// Adds all numbers of `other`.
    pub fn merge(&mut self, other: &Self) {
        let merged = self.histogram.add(&other.histogram);
        assert!(merged.is_ok(), "a histogram that resizes itself can hold every number");
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// The number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.histogram.len()
    }

    /// True if there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.histogram.is_empty()
    }

    /// The mean; 0 if there are no samples.
    #[must_use]
    pub fn mean(&self) -> f64 {
        ratio(self.sum as f64, self.len() as f64)
    }

    /// The smallest number that is not below a share `quantile` of all, to three digits; 0 if there
    /// are no samples.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> u64 {
        // The histogram returns the upper end of a bin, which may be above the maximum.
        self.histogram.value_at_quantile(quantile).min(self.max)
    }

    /// The quantiles of ascending shares above 0. It looks at each bin once, where [`Samples::quantile`] adds
    /// up all bins from the first.
    #[must_use]
    pub fn quantiles(&self, shares: impl IntoIterator<Item = f64>) -> Vec<u64> {
        let mut bins = self.histogram.iter_recorded();
        let (mut counted, mut value) = (0, 0);
        let mut of = |share: f64| {
            let wanted = (share * self.len() as f64).ceil() as u64;
            while counted < wanted.max(1)
                && let Some(bin) = bins.next()
            {
                counted += bin.count_since_last_iteration();
                value = bin.value_iterated_to();
            }
            value.min(self.max)
        };
        shares.into_iter().map(&mut of).collect()
    }

    /// The largest number; 0 if there are no samples.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.max
    }
}

/// `a / b`; 0 if `b` is 0.
fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// Rounds to three decimals: microseconds, if the unit is a millisecond.
fn round(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

/// Latencies of committed requests by priority and region, and by kind. They include retries.
#[derive(Clone, Default, Debug)]
pub struct Latencies {
    by_place: OrdMap<(Priority, RegionId), Samples>,
    by_kind: OrdMap<&'static str, Samples>,
}

impl Latencies {
    /// Adds the latency of one request.
    pub fn record(&mut self, priority: Priority, region: RegionId, latency: Duration) {
        self.by_place.entry((priority, region)).or_default().record(nanos(latency));
    }

    /// Adds the latency of one request to a kind: the name of its transaction, or its reach.
    pub fn record_kind(&mut self, kind: &'static str, latency: Duration) {
        self.by_kind.entry(kind).or_default().record(nanos(latency));
    }

    /// Adds all latencies of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (key, samples) in &other.by_place {
            self.by_place.entry(*key).or_default().merge(samples);
        }
        for (kind, samples) in &other.by_kind {
            self.by_kind.entry(kind).or_default().merge(samples);
        }
    }

    /// The latencies of each kind.
    #[must_use]
    pub fn by_kind(&self) -> OrdMap<String, OfKind> {
        let of = |samples: &Samples| OfKind {
            latency_ms: Summary::of_nanos(samples),
            cdf_ms: cdf_ms(samples),
        };
        self.by_kind.iter().map(|(kind, samples)| ((*kind).to_owned(), of(samples))).collect()
    }

    /// The distribution function of all latencies, as in [`OfKind::cdf_ms`]; empty if there are
    /// none.
    #[must_use]
    pub fn cdf_ms(&self) -> Vec<f64> {
        let all = self.merged(|_, _| true);
        if all.is_empty() { Vec::new() } else { cdf_ms(&all) }
    }

    /// All latencies.
    #[must_use]
    pub fn all(&self) -> Summary {
        self.select(|_, _| true)
    }

    /// Latencies of transactions above [`Priority::LOW`].
    #[must_use]
    pub fn high(&self) -> Summary {
        self.select(|priority, _| priority > Priority::LOW)
    }

    /// Latencies of transactions of [`Priority::LOW`].
    #[must_use]
    pub fn low(&self) -> Summary {
        self.select(|priority, _| priority == Priority::LOW)
    }

    /// Latencies of transactions that clients in one region submitted.
    #[must_use]
    pub fn of_region(&self, region: RegionId) -> Summary {
        self.select(|_, at| at == region)
    }

    /// Latencies of each region that has any. `names` has the names of the regions, by id.
    #[must_use]
    pub fn by_region<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
    ) -> OrdMap<String, Summary> {
        let numbered = (0..).map(RegionId).zip(names);
        let summaries = numbered.map(|(region, name)| (name.to_owned(), self.of_region(region)));
        summaries.filter(|(_, summary)| summary.n > 0).collect()
    }

    /// A summary of the latencies whose priority and region `wanted` accepts.
    #[must_use]
    pub fn select(&self, wanted: impl Fn(Priority, RegionId) -> bool) -> Summary {
        Summary::of_nanos(&self.merged(wanted))
    }

    fn merged(&self, wanted: impl Fn(Priority, RegionId) -> bool) -> Samples {
        let mut chosen = Samples::default();
        for (&(priority, region), samples) in &self.by_place {
            if wanted(priority, region) {
                chosen.merge(samples);
            }
        }
        chosen
    }
}

/// The number of points of a distribution function in results.
const CDF_POINTS: f64 = 50.0;

fn cdf_ms(samples: &Samples) -> Vec<f64> {
    let shares = (1..=CDF_POINTS as u32).map(|at| f64::from(at) / CDF_POINTS);
    samples.quantiles(shares).into_iter().map(|nanos| round(nanos as f64 / 1e6)).collect()
}

/// Latencies of one kind of transactions.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfKind {
    /// The summary.
    pub latency_ms: Summary,
    /// The distribution function: 2 %, 4 %, … 100 % of the latencies are at most these.
    pub cdf_ms: Vec<f64>,
}

/// A distribution of latencies in milliseconds. All fields are zero if `n` is.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// The number of latencies.
    pub n: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

impl Summary {
    /// A summary of samples in nanoseconds.
    #[must_use]
    pub fn of_nanos(samples: &Samples) -> Self {
        let millis = |nanos: f64| round(nanos / 1_000_000.0);
        let quantile = |quantile| millis(samples.quantile(quantile) as f64);
        Self {
            n: samples.len(),
            mean: millis(samples.mean()),
            p50: quantile(0.50),
            p90: quantile(0.90),
            p95: quantile(0.95),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: millis(samples.max() as f64),
        }
    }
}

/// Counts of the measured part of a run. The caller that runs it increments the fields.
#[derive(Clone, Default, Debug)]
pub struct Counters {
    /// Requests that arrived.
    pub offered: u64,
    /// Requests that committed.
    pub committed: u64,
    /// Attempts that aborted, by reason; including those whose request committed later.
    pub aborted: OrdMap<AbortReason, u64>,
    /// Requests that failed: they ran out of attempts, their own guard refused them, or their
    /// outcome is unknown.
    pub failed: u64,
    /// Attempts by the protocol's path on which they ended.
    pub path: OrdMap<String, u64>,
    /// Messages sent between nodes.
    pub messages: u64,
    /// Bytes sent between nodes.
    pub bytes: u64,
    /// Latency of each committed request, divided by its latency floor, in thousandths.
    pub floor_ratio_millis: Samples,
    /// Wide-area round trips of each committed request, in thousandths (one way is 500).
    pub wan_round_trip_millis: Samples,
}

impl Counters {
    /// Attempts that aborted, for any reason.
    #[must_use]
    pub fn aborted_attempts(&self) -> u64 {
        self.aborted.values().sum()
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.offered += other.offered;
        self.committed += other.committed;
        self.failed += other.failed;
        self.messages += other.messages;
        self.bytes += other.bytes;
        for (reason, count) in &other.aborted {
            *self.aborted.entry(*reason).or_default() += count;
        }
        for (path, count) in &other.path {
            *self.path.entry(path.clone()).or_default() += count;
        }
        self.floor_ratio_millis.merge(&other.floor_ratio_millis);
        self.wan_round_trip_millis.merge(&other.wan_round_trip_millis);
    }
}

/// Describes a run.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Run {
    /// The protocol's name.
    pub protocol: String,
    /// The topology's name.
    pub topology: String,
    /// The workload's name, parameters included.
    pub workload: String,
    /// The seed.
    pub seed: u64,
    /// Duration of the measured part, by the run's own clock.
    pub measured: Duration,
    /// Duration of the whole run, by the simulated clock.
    pub simulated: Duration,
    /// Real time that the run took on this machine.
    pub wall: Duration,
    /// Message deliveries, timers and disk completions handled in the whole run.
    pub events: u64,
}

/// Latencies by priority.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyMs {
    /// All requests.
    pub all: Summary,
    /// Requests of high priority.
    pub high: Summary,
    /// Requests of low priority.
    pub low: Summary,
}

/// Latency divided by the latency floor.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FloorRatio {
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
}

/// Wide-area round trips per committed request.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WanRoundTrips {
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
}

/// The checker's verdict on the run's history.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// The guarantee that was checked: `strict-serializable` or `serializable`.
    pub model: String,
    /// True if it holds.
    pub ok: bool,
    /// The first anomaly and its kind; null if there is none.
    pub anomaly: Option<String>,
}

impl From<&Verdict> for Check {
    fn from(verdict: &Verdict) -> Self {
        let first = verdict.anomalies.first();
        Self {
            model: verdict.model.to_string(),
            ok: verdict.ok,
            anomaly: first.map(|anomaly| format!("{}: {}", anomaly.kind, anomaly.problem)),
        }
    }
}

/// The result of a run, as `sim --json` prints it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunResult {
    /// The protocol's name.
    pub protocol: String,
    /// The topology's name.
    pub topology: String,
    /// The workload's name, parameters included.
    pub workload: String,
    /// The seed.
    pub seed: u64,
    /// Duration of the run by the simulated clock.
    pub simulated_seconds: f64,
    /// Real time that the run took on this machine.
    pub wall_seconds: f64,
    /// Message deliveries, timers and disk completions handled.
    pub events: u64,
    /// Requests that arrived per second.
    pub offered_tps: f64,
    /// Requests that committed per second.
    pub committed_tps: f64,
    /// Requests that committed.
    pub committed: u64,
    /// Attempts that aborted.
    pub aborted_attempts: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Committed requests as a share of the attempts that committed or aborted; 0 if there are
    /// none.
    pub commit_rate: f64,
    /// Latency of committed requests in milliseconds.
    pub latency_ms: LatencyMs,
    /// The same by kind: by the names of the workload's transactions, and by reach: `local`,
    /// `close` or `far`. Absent if nothing committed.
    #[serde(default, skip_serializing_if = "OrdMap::is_empty")]
    pub kinds: OrdMap<String, OfKind>,
    /// Latency divided by the latency floor.
    pub floor_ratio: FloorRatio,
    /// Wide-area round trips per committed request.
    pub wan_round_trips: WanRoundTrips,
    /// Bytes sent between nodes per committed request.
    pub bytes_per_txn: f64,
    /// Messages sent between nodes per committed request.
    pub messages_per_txn: f64,
    /// Attempts by the protocol's path on which they ended.
    pub path: OrdMap<String, u64>,
    /// The checker's verdict; absent if no history was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
}

impl RunResult {
    /// Computes the result of a run.
    #[must_use]
    pub fn new(run: Run, latencies: &Latencies, counters: &Counters, check: Option<Check>) -> Self {
        let (committed, aborted) = (counters.committed as f64, counters.aborted_attempts() as f64);
        let seconds = run.measured.as_secs_f64();
        let thousandths = |value: f64| round(value / 1_000.0);
        let floor = |quantile| thousandths(counters.floor_ratio_millis.quantile(quantile) as f64);
        let wan = &counters.wan_round_trip_millis;
        Self {
            protocol: run.protocol,
            topology: run.topology,
            workload: run.workload,
            seed: run.seed,
            simulated_seconds: round(run.simulated.as_secs_f64()),
            wall_seconds: round(run.wall.as_secs_f64()),
            events: run.events,
            offered_tps: round(ratio(counters.offered as f64, seconds)),
            committed_tps: round(ratio(committed, seconds)),
            committed: counters.committed,
            aborted_attempts: counters.aborted_attempts(),
            failed: counters.failed,
            commit_rate: ratio(committed, committed + aborted),
            latency_ms: LatencyMs {
                all: latencies.all(),
                high: latencies.high(),
                low: latencies.low(),
            },
            kinds: latencies.by_kind(),
            floor_ratio: FloorRatio { p50: floor(0.50), p95: floor(0.95) },
            wan_round_trips: WanRoundTrips {
                mean: thousandths(wan.mean()),
                max: thousandths(wan.max() as f64),
            },
            bytes_per_txn: round(ratio(counters.bytes as f64, committed)),
            messages_per_txn: round(ratio(counters.messages as f64, committed)),
            path: counters.path.clone(),
            check,
        }
    }
}

/// When a client retries an aborted request: at once, as in Natto §5.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retry {
    /// Attempts a request gets, the first included.
    pub attempts: u32,
    /// The same for requests of low priority.
    pub attempts_low: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self::up_to(100)
    }
}

impl Retry {
    /// The same number of attempts for every priority.
    #[must_use]
    pub fn up_to(attempts: u32) -> Self {
        Self { attempts, attempts_low: attempts }
    }

    /// The name of the attempt after `txn`, which aborted for `reason`. None if the client gives
    /// up: it is out of attempts, or the client or the transaction's own guard refused, so that an
    /// immediate retry would change nothing.
    #[must_use]
    pub fn after(self, txn: TxnId, priority: Priority, reason: AbortReason) -> Option<TxnId> {
        let is_worth_it = match reason {
            AbortReason::Conflict
            | AbortReason::StaleRead
            | AbortReason::Recovery
            | AbortReason::Abandoned
            | AbortReason::Overload => true,
            AbortReason::Client
            | AbortReason::Guard
            | AbortReason::Invalid
            | AbortReason::TooLarge => false,
        };
        let attempts = if priority == Priority::LOW { self.attempts_low } else { self.attempts };
        (is_worth_it && txn.attempt.saturating_add(1) < attempts).then(|| txn.retry())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::id::ClientId;
    use proptest::prelude::*;

    fn latencies(values: &[(Priority, u16, u64)]) -> Latencies {
        let mut latencies = Latencies::default();
        for &(priority, region, micros) in values {
            latencies.record(priority, RegionId(region), Duration::from_micros(micros));
        }
        latencies
    }

    proptest! {
        #[test]
        fn quantiles_together_are_those_of_each_share(
            values in proptest::collection::vec(0_u64..1 << 40, 0..300),
            mut shares in proptest::collection::vec(0.001..=1.0, 0..60),
        ) {
            let mut samples = Samples::default();
            values.into_iter().for_each(|value| samples.record(value));
            shares.push(1.0);
            shares.sort_by(f64::total_cmp);
            let each: Vec<u64> = shares.iter().map(|&share| samples.quantile(share)).collect();
            prop_assert_eq!(samples.quantiles(shares), each);
        }
    }

    #[test]
    fn quantiles_are_within_a_thousandth_and_the_rest_is_exact() {
        let values: Vec<_> = (1..=10_000).map(|n| (Priority::LOW, 0, n * 97)).collect();
        let summary = latencies(&values).all();
        assert_eq!(summary.n, 10_000);
        assert_eq!(summary.mean, round(97.0 * 5_000.5 / 1_000.0));
        assert_eq!(summary.max, 970.0);
        for (found, exact) in [
            (summary.p50, 485.0),
            (summary.p90, 873.0),
            (summary.p95, 921.5),
            (summary.p99, 960.3),
            (summary.p999, 969.03),
        ] {
            assert!((found - exact).abs() <= exact / 1_000.0, "{found} is not {exact}");
        }
    }

    #[test]
    fn one_sample_is_every_quantile() {
        let summary = latencies(&[(Priority::LOW, 0, 123_457)]).all();
        assert_eq!((summary.p50, summary.p999, summary.max), (123.457, 123.457, 123.457));
        assert_eq!(Latencies::default().all(), Summary::default());
    }

    #[test]
    fn merging_is_the_same_as_recording_together() {
        let a = [(Priority::LOW, 0, 5), (Priority::HIGH, 1, 9_000_000)];
        let b = [(Priority::LOW, 0, 70_000), (Priority::HIGH, 0, 1), (Priority(2), 0, 3)];
        let mut merged = latencies(&a);
        merged.merge(&latencies(&b));
        let together = latencies(&[a.as_slice(), &b].concat());
        assert_eq!(merged.all(), together.all());
        assert_eq!(merged.high(), together.high());
        assert_eq!((merged.high().n, merged.low().n), (3, 2));
        assert_eq!(merged.of_region(RegionId(1)).n, 1);
        let named = merged.by_region(["A", "B", "C"]);
        assert_eq!(named["B"], merged.of_region(RegionId(1)));
        assert!(!named.contains_key("C"), "nothing was measured there");
    }

    #[test]
    fn kinds_have_summaries_and_distribution_functions() {
        let mut latencies = Latencies::default();
        for micros in 1..=1_000 {
            latencies.record_kind("local", Duration::from_micros(micros * 1_000));
            latencies.record_kind("far", Duration::from_micros(7_000));
        }
        let mut merged = Latencies::default();
        merged.merge(&latencies);
        let kinds = merged.by_kind();
        assert_eq!(kinds.keys().collect::<Vec<_>>(), ["far", "local"]);
        assert_eq!((kinds["far"].latency_ms.n, kinds["far"].latency_ms.p99), (1_000, 7.0));
        let cdf = &kinds["local"].cdf_ms;
        assert_eq!(cdf.len(), 50);
        for (at, found) in (1..).zip(cdf) {
            let exact = f64::from(at) * 20.0;
            assert!((found - exact).abs() <= exact / 500.0, "{found} is not {exact}");
        }
    }

    #[test]
    fn a_result_has_the_published_form() {
        let mut counters = Counters {
            offered: 12,
            committed: 8,
            failed: 1,
            messages: 80,
            bytes: 4_000,
            ..Counters::default()
        };
        counters.aborted.insert(AbortReason::Conflict, 2);
        counters.path.insert("fast".into(), 8);
        counters.floor_ratio_millis.record(1_250);
        counters.wan_round_trip_millis.record(1_000);
        counters.wan_round_trip_millis.record(2_000);
        let run = Run {
            protocol: "p".into(),
            topology: "azure5".into(),
            workload: "ycsbt:4".into(),
            seed: 7,
            measured: Duration::from_secs(4),
            simulated: Duration::from_secs(6),
            wall: Duration::from_millis(1_500),
            events: 99,
        };
        let latencies = latencies(&[(Priority::HIGH, 0, 1_500)]);
        let result = RunResult::new(run, &latencies, &counters, None);
        let none =
            r#"{"n":0,"mean":0.0,"p50":0.0,"p90":0.0,"p95":0.0,"p99":0.0,"p999":0.0,"max":0.0}"#;
        let one =
            r#"{"n":1,"mean":1.5,"p50":1.5,"p90":1.5,"p95":1.5,"p99":1.5,"p999":1.5,"max":1.5}"#;
        let expected = format!(
            r#"{{"protocol":"p","topology":"azure5","workload":"ycsbt:4","seed":7,"simulated_seconds":6.0,"wall_seconds":1.5,"events":99,"offered_tps":3.0,"committed_tps":2.0,"committed":8,"aborted_attempts":2,"failed":1,"commit_rate":0.8,"latency_ms":{{"all":{one},"high":{one},"low":{none}}},"floor_ratio":{{"p50":1.25,"p95":1.25}},"wan_round_trips":{{"mean":1.5,"max":2.0}},"bytes_per_txn":500.0,"messages_per_txn":10.0,"path":{{"fast":8}}}}"#
        );
        assert_eq!(serde_json::to_string(&result).unwrap(), expected);
        let check = Check { model: "serializable".into(), ok: true, anomaly: None };
        let text = serde_json::to_string(&RunResult { check: Some(check), ..result }).unwrap();
        assert!(
            text.ends_with(r#","check":{"model":"serializable","ok":true,"anomaly":null}}"#),
            "{text}"
        );
        serde_json::from_str::<RunResult>(&text).unwrap();
    }

    #[test]
    fn a_run_without_a_commit_has_finite_figures() {
        let result =
            RunResult::new(Run::default(), &Latencies::default(), &Counters::default(), None);
        assert!(!serde_json::to_string(&result).unwrap().contains("null"));
    }

    #[test]
    fn retries_end_and_spare_what_would_abort_again() {
        let first = TxnId::new(ClientId(1), 1);
        let (high, low) = (Priority::HIGH, Priority::LOW);
        let retry = Retry { attempts: 3, attempts_low: 1 };
        let second = retry.after(first, high, AbortReason::Conflict).unwrap();
        let third = retry.after(second, high, AbortReason::Overload).unwrap();
        assert_eq!(third.attempt, 2);
        assert_eq!(retry.after(third, high, AbortReason::Conflict), None);
        assert_eq!(retry.after(first, low, AbortReason::Conflict), None);
        for reason in [AbortReason::Client, AbortReason::Guard, AbortReason::Invalid] {
            assert_eq!(retry.after(first, high, reason), None);
        }
    }
}
