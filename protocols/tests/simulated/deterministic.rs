//! The deterministic protocols.

use orthodrome_core::Duration;
use orthodrome_protocols::deterministic::{
    CALVIN, Config, Deterministic, SLOG, SLOG_CONSENSUS, SLOTH,
};
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::{SwarmOptions, run_seed_with};

use super::support::{Notes, catch, expect, first_failure, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise_with_one_log() {
    let notes = hold_every_promise(CALVIN, 0..seeds(200) / 2, 4);
    // Whoever sequences turns away what its log has: none of 700 seeds sees an entry twice in the
    // one log.
    let expected =
        ["RepeatedSequence", "AlreadyRan", "Resolved", "AskedAgain", "Checkpoint", "Deposed"];
    expect(&notes, &["WantedReads", "SentReadsAgain"]);
    expect(&notes, &expected);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_a_stream_for_each_region() {
    let first = 100_000;
    let notes = hold_every_promise(SLOTH, first..first + seeds(200) / 2, 4);
    let expected = [
        "AlreadyRan",
        "Resolved",
        "AskedAgain",
        "Checkpoint",
        "Forwarded",
        "Component",
        "Held",
        "Closed",
        "Acknowledged",
        "Relocated",
        "Void",
    ];
    expect(&notes, &expected);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_pieces_of_what_is_ordered_before() {
    for (name, first) in [(SLOG, 300_000), (SLOG_CONSENSUS, 400_000)] {
        let notes = hold_every_promise(name, first..first + seeds(200) / 4, 4);
        expect(&notes, &["Resolved", "AskedAgain", "Checkpoint", "Deposed", "Relocated", "Void"]);
        // They cannot close a cycle: no component, asserted by every server, and none forwards
        // anything.
        assert!(!notes.contains_key("Component") && !notes.contains_key("Forwarded"), "{notes:?}");
    }
}

/// Logs that keep next to nothing: servers that were away take another's state, each of which may
/// be ahead of the other in some stream. Where links lose packets, a lost piece is requested again.
#[test]
fn servers_that_are_far_behind_take_a_state() {
    let mut all = Notes::default();
    for name in [CALVIN, SLOG, SLOTH] {
        let mut taken = 0;
        for seed in 0..seeds(200) / 10 {
            let options = SwarmOptions { shrink_budget: 0, ..SwarmOptions::of(name) };
            let settings = |config: &mut Config| {
                config.log_kept = 8;
                config.hosting.checkpoint_bytes = 3_000;
                config.hosting.chunk_keys = 3;
                config.piece_bytes = 500;
            };
            let result = run_seed_with::<Deterministic>(seed, &options, Some(settings)).unwrap();
            taken += result.first.notes.get("SnapshotInstalled").copied().unwrap_or(0);
            for (note, times) in &result.first.notes {
                *all.entry(note.clone()).or_insert(0) += times;
            }
            if let Some(found) = result.found {
                panic!("{name}, seed {seed}: {}", found.failure);
            }
        }
        assert!(taken > 0, "{name}: nobody took a state");
    }
    expect(&all, &["WantedState", "WantedPieceAgain"]);
}

/// The first server loses some of what it writes. Others go on; it finds that its digests differ
/// from theirs, and stops.
#[test]
fn a_server_whose_copy_differs_stops() {
    for name in [CALVIN, SLOG, SLOTH] {
        first_failure::<Deterministic>(
            name,
            FailureKind::Panic,
            "came to different results",
            |config| {
                config.mutations.enable("loses_writes");
                config.compare_interval = Duration::from_millis(50);
                config.compared_entries = 4;
            },
        );
    }
}

/// Unsafe variants, and within how many seeds they are caught.
const CAUGHT_WITHIN: [(&str, &str, u64); 17] = [
    (CALVIN, "S2", 60),
    (CALVIN, "S7", 10),
    (CALVIN, "S9", 300),
    (CALVIN, "S11", 100),
    (CALVIN, "R6", 20),
    (SLOG, "S2", 60),
    (SLOG, "S7", 10),
    (SLOG, "S10", 300),
    (SLOG_CONSENSUS, "S2", 80),
    (SLOG_CONSENSUS, "S10", 200),
    (SLOTH, "S1", 160),
    (SLOTH, "S2", 120),
    (SLOTH, "S6", 200),
    (SLOTH, "S7", 10),
    (SLOTH, "S10", 200),
    (SLOTH, "S11", 200),
    (SLOTH, "R6", 200),
];

#[test]
fn mutations_are_caught_by_the_swarm() {
    for (name, mutation, within) in CAUGHT_WITHIN {
        catch(name, mutation, None, within);
    }
    // S4 is caught by the random runs of the replicated log
    // (`letting_the_longest_log_lead_is_caught`).
}
