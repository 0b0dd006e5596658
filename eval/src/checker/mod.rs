//! The serializability checker.
//!
//! [`check`] decides whether one order of all transactions that took effect explains everything
//! that a [`History`] says was read, and for strict serializability whether such an order also
//! agrees with the clock. It says why not by a shortest cycle of transactions, each of which must
//! precede the next for a stated reason.
//!
//! The anomalies are those of Adya, *Weak Consistency* (PhD thesis, MIT 1999); inferring them from
//! lists is the idea of Kingsbury and Alvaro, *Elle: Inferring Isolation Anomalies from
//! Experimental Observations*, VLDB 14(3), 2020.
//!
//! # Method
//! 1. `effects`: an attempt took effect if it is `ok`, or `info` and read by one that took effect.
//!    An `info` attempt that nobody read may be taken never to have happened.
//! 2. `lists` and `versions`: the order of versions of each key gives edges *ww* (to the writer of
//!    the next version), *wr* (from the writer to each reader) and *rw* (from each reader to the
//!    writer of the next version). Reads that fit no order at all are reported by themselves.
//! 3. `order`: for strict serializability, edges from what completed to what was invoked later.
//! 4. `graph`: Tarjan's strongly connected components, in one pass over a graph whose size is
//!    linear in the history. No component, no anomaly.
//! 5. `cycles`: in each component, the shortest cycle of each kind, from G0 down to G2-item.
//!
//! Reads of any consistent state, however old ([`crate::history::Entry::stale`]), are no part of
//! that graph, whatever the model: each by itself must fit into the order of those that are, by
//! dependencies alone. So each saw a state that could have been (update serializability, PL-3U:
//! Adya); two of them may disagree on the order of what does not conflict, and none says anything
//! of real time.
//!
//! # What a verdict is worth
//! - *Sound*: what is reported is wrong in every order that could explain the history.
//! - *Complete for lists*: if nothing is reported, then every topological order of the graph
//!   explains all reads. Appends that nobody read are ordered after the longest list read; their
//!   order among themselves is free, because no read depends on it.
//! - *Complete for versions* under the order that the database states, except for committed writes
//!   whose timestamp neither writer nor reader knew: see [`Verdict::unplaced_writes`], and for
//!   reads of absent keys whose deletions the database had forgotten: see
//!   [`Verdict::unplaced_reads`].
//! - What failed and unknown attempts read is not held to the order of all transactions, unless the
//!   attempt proves to have committed. But their clients saw it, so it must not be older than what
//!   they had been told (`session`, for strict serializability; stale reads too). Intermediate
//!   versions (G1b) exist only for lists, since a transaction writes at most one version of a key.
//! - Time is strict: what completes in the microsecond in which another is invoked may be
//!   concurrent with it. Real time includes the order within processes; cycles that need only the
//!   latter are named so.
//! - Which cycles are shown is bounded, and in groups of millions of entangled transactions the
//!   search for the shortest gives up early; whether there is a cycle is always exact.

mod absences;
mod cycles;
mod effects;
mod graph;
mod lists;
mod order;
mod session;
mod verdict;
mod versions;
mod words;

#[cfg(test)]
mod brute;
#[cfg(test)]
mod crafted;

use crate::history::dense::Dense;
use crate::history::{History, Status};

pub use verdict::{
    Anomaly, Counts, Dependency, Kind, MAX_OF_A_KIND, Model, Order, ParseModelError, Phenomenon,
    Step, Verdict,
};

use effects::Effects;
use graph::Builder;
use verdict::Findings;

/// Judges a history.
///
/// Takes time and memory linear in the history, apart from sorting.
#[must_use]
pub fn check(history: &History, model: Model) -> Verdict {
    let mut findings = Findings::default();
    let appends = lists::Appends::new(history, &mut findings);
    let effects = Effects::new(history, &appends);
    let longer = effects::longer_trunks(history, &effects);
    let trunks = Dense::from(
        (0..history.keys_len())
            .map(|key| longer.get(&key).map_or(history.trunk(key), Vec::as_slice))
            .collect::<Vec<_>>(),
    );

    let stale = history.attempts().filter(|attempt| history.is_stale(*attempt)).collect();
    let mut builder = Builder::with_apart(history.attempts().end, stale);
    let mut lists = lists::Lists::new(history, &effects, &appends, trunks.clone(), &mut findings);
    lists.add_edges(&mut builder, &mut findings);
    let versions = versions::Versions::new(history, &effects, &mut findings);
    let is_strict = model == Model::StrictSerializable;
    let unplaced_reads = versions.add_edges(is_strict, &mut builder, &mut findings);
    if is_strict {
        let attempts: Vec<u32> = history
            .attempts()
            .filter(|attempt| effects.took[*attempt] && !history.is_stale(*attempt))
            .collect();
        order::process(history, &attempts, &mut builder);
        order::real_time(history, &attempts, &mut builder);
        session::judge(history, &effects, (&lists, &versions), &mut findings);
    }
    let unplaced_writes = versions.unplaced;
    drop(lists);
    drop(versions);

    let words = words::Words { history, effects: &effects, trunks: &trunks };
    let graph = builder.build();
    cycles::report(&graph, &words, &mut findings);
    cycles::report_apart(&graph, &words, &mut findings);
    let (anomalies, unreported) = findings.finish();
    Verdict {
        model,
        ok: anomalies.is_empty() && unreported == 0,
        transactions: count(history, &effects),
        anomalies,
        unreported,
        unplaced_writes,
        unplaced_reads,
    }
}

fn count(history: &History, effects: &Effects) -> Counts {
    let mut counts = Counts::default();
    for attempt in history.attempts() {
        match history.status(attempt) {
            Status::Ok if history.is_stale(attempt) => counts.stale += 1,
            Status::Ok => counts.ok += 1,
            Status::Fail => counts.fail += 1,
            Status::Info => {
                counts.info += 1;
                counts.info_committed += u64::from(effects.took[attempt]);
            }
        }
    }
    counts
}
