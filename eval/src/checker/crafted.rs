//! Every anomaly by itself, with its name; and the same history without the faulty operation, which
//! must pass.
//!
//! Histories are written one attempt a line: name, status, invocation and completion in
//! milliseconds, operations. `a k 1` appends, `r k 1 2` reads a list, `v k c1.1@5` reads a version,
//! `w k 5` writes one and `w k ?` writes one whose timestamp is not known; `d` deletes as `w`
//! writes. `!` marks the faulty operation.

use super::{Kind, Model, Order, Phenomenon, Verdict, check};
use crate::history::{Entry, History, Op, Status};

fn entry(line: &str, with_fault: bool) -> Entry {
    let (head, ops) = line.split_once('|').unwrap_or((line, ""));
    let head: Vec<&str> = head.split_whitespace().collect();
    let [txn, status, invoke, complete] = head[..] else { panic!("{line:?} lacks something") };
    let ops = ops.split('|').map(str::trim).filter(|op| with_fault || !op.starts_with('!'));
    let op = |text: &str| {
        let words: Vec<&str> = text.trim_start_matches('!').split_whitespace().collect();
        let key = words[1].to_owned();
        match words[0] {
            "a" => Op::Append(key, words[2].parse().unwrap()),
            "r" => Op::ReadList(key, words[2..].iter().map(|word| word.parse().unwrap()).collect()),
            "v" => Op::ReadVersion(key, words[2].into()),
            "w" if words[2] == "?" => Op::WriteVersion(key, None),
            "w" => Op::WriteVersion(key, Some(format!("{txn}@{}", words[2]))),
            "d" if words[2] == "?" => Op::DeleteVersion(key, None),
            "d" => Op::DeleteVersion(key, Some(format!("{txn}@{}", words[2]))),
            other => panic!("{other:?} is no operation"),
        }
    };
    Entry {
        txn: txn.into(),
        process: txn[1..].split('.').next().unwrap().parse().unwrap(),
        region: "VA".into(),
        priority: "low".into(),
        stale: status == "stale",
        invoke_us: invoke.parse::<u64>().unwrap() * 1_000,
        complete_us: complete.parse::<u64>().ok().map(|ms| ms * 1_000),
        status: match status {
            "ok" | "stale" => Status::Ok,
            "fail" => Status::Fail,
            "info" => Status::Info,
            other => panic!("{other:?} is no status"),
        },
        ops: ops.filter(|op| !op.is_empty()).map(op).collect(),
    }
}

fn history(text: &str, with_fault: bool) -> History {
    let mut history = History::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        history.push(&entry(line, with_fault)).unwrap();
    }
    history
}

fn judge(text: &str, model: Model) -> Verdict {
    check(&history(text, true), model)
}

fn kinds(verdict: &Verdict) -> Vec<String> {
    verdict.anomalies.iter().map(|anomaly| anomaly.kind.to_string()).collect()
}

/// Asserts that the history has exactly these anomalies under each model, and none without the
/// marked operation.
#[track_caller]
fn caught(text: &str, strict: &[&str], serializable: &[&str]) {
    for (model, expected) in
        [(Model::StrictSerializable, strict), (Model::Serializable, serializable)]
    {
        let verdict = judge(text, model);
        assert_eq!(kinds(&verdict), expected, "{verdict}");
        assert_eq!(verdict.ok, expected.is_empty());
        for anomaly in &verdict.anomalies {
            assert!(!anomaly.problem.is_empty());
            let nexts = anomaly.cycle.iter().cycle().skip(1);
            for (step, next) in anomaly.cycle.iter().zip(nexts) {
                assert_eq!(step.to, next.from, "{verdict}");
                assert!(step.reason.contains(&step.from.to_string()), "{verdict}");
                assert!(step.reason.contains(&step.to.to_string()), "{verdict}");
            }
        }
        let clean = check(&history(text, false), model);
        assert!(clean.ok && clean.anomalies.is_empty(), "without its fault: {clean}");
    }
}

/// Asserts that the history is wrong under both models.
#[track_caller]
fn always_caught(text: &str, expected: &[&str]) {
    caught(text, expected, expected);
}

#[test]
fn lists_g0() {
    let text = "c1.1 ok 0 9 | a x 1 | a y 1
                c2.1 ok 0 9 | a x 2 | a y 2
                c3.1 ok 0 9 | r x 1 2
                c4.1 ok 0 9 | !r y 2 1";
    always_caught(text, &["G0"]);
}

#[test]
fn lists_g1a() {
    let text = "c1.1 fail 0 9 | a x 1
                c2.1 ok   0 9 | !r x 1";
    always_caught(text, &["G1a"]);
    // A retry appends the same element and commits: the read saw that one.
    let text = "c1.1   fail 0 4 | a x 1
                c1.1#1 ok   5 9 | a x 1
                c2.1   ok   0 9 | r x 1 | !r y 7";
    always_caught(text, &["garbage-read"]);
}

#[test]
fn lists_g1b() {
    let text = "c1.1 ok 0 9 | a x 1 | a x 2
                c2.1 ok 0 9 | !r x 1
                c3.1 ok 0 9 | r x 1 2";
    always_caught(text, &["G1b"]);
    // Also when nobody read the final list.
    let text = "c1.1 ok 0 9 | a x 1 | a x 2
                c2.1 ok 0 9 | !r x 1";
    always_caught(text, &["G1b"]);
}

#[test]
fn lists_g1c() {
    let text = "c1.1 ok 0 9 | a x 1 | !r y 2
                c2.1 ok 0 9 | r x 1 | a y 2";
    always_caught(text, &["G1c"]);
}

#[test]
fn lists_g_single() {
    let text = "c1.1 ok 0 9 | a x 1 | a y 1
                c2.1 ok 0 9 | !r x | r y 1";
    always_caught(text, &["G-single"]);
    // A lost update: both read the list before either append, and both appends are there.
    let text = "c1.1 ok 0 9 | r x | a x 1
                c2.1 ok 0 9 | !r x | a x 2
                c3.1 ok 0 9 | r x 1 2";
    always_caught(text, &["G-single"]);
}

#[test]
fn lists_g2_item() {
    let text = "c1.1 ok 0 9 | r x | a y 1
                c2.1 ok 0 9 | !r y | a x 1";
    always_caught(text, &["G2-item"]);
    // The same with three transactions; and with appends that nobody read, two to a key.
    let text = "c1.1 ok 0 9 | r x | a y 1
                c2.1 ok 0 9 | r y | a z 1
                c3.1 ok 0 9 | !r z | a x 1 | a y 3";
    always_caught(text, &["G2-item"]);
    let text = "c1.1 ok 0 9 | r x | a x 1
                c2.1 ok 0 9 | !r x | a x 2";
    always_caught(text, &["G2-item"]);
}

#[test]
fn lists_that_cannot_be() {
    always_caught(
        "c1.1 ok 0 9 | a x 1 | r x 1 \n c2.1 ok 0 9 | !r x 7",
        &["garbage-read", "incompatible-order"],
    );
    always_caught("c1.1 ok 0 9 | a x 1 \n c2.1 ok 0 9 | !r x 1 1", &["duplicate-append"]);
    let text = "c1.1   fail 0 2 | a x 1
                c1.1#1 ok   3 9 | a x 1
                c2.1   ok   0 9 | !r x 1 1";
    always_caught(text, &["duplicate-append"]);
    let text = "c1.1 ok 0 9 | a x 1
                c2.1 ok 0 9 | a x 2
                c3.1 ok 0 9 | r x 1 2
                c4.1 ok 0 9 | !r x 2";
    always_caught(text, &["incompatible-order"]);
    // One transaction's appends in an order that is not its own, and the second without the first.
    always_caught(
        "c1.1 ok 0 9 | a x 1 | a x 2 \n c2.1 ok 0 9 | !r x 2 1",
        &["G1b", "incompatible-order"],
    );
    always_caught(
        "c1.1 ok 0 9 | a x 1 | a x 2 \n c2.1 ok 0 9 | !r x 2",
        &["incompatible-order", "G-single"],
    );
    let text = "c1.1 ok 0 9 | a x 1
                c2.1 info 0 9 | !a x 1";
    always_caught(text, &["ambiguous-append"]);
}

#[test]
fn lists_internal() {
    for text in [
        "c1.1 ok 0 9 | a x 1 | !r x",
        "c1.1 ok 0 9 | !r x 1 | a x 1",
        "c1.1 ok 0 9 | a x 1 | a x 2 | !r x 1",
        "c1.1 ok 0 9 | a x 1 \n c2.1 ok 0 9 | r x | !r x 1",
    ] {
        always_caught(text, &["internal"]);
    }
    // Its second read also shows which append its first one missed.
    let text = "c1.1 ok 0 9 | a x 1
                c2.1 ok 0 9 | r x | a x 2 | !r x 1 2";
    always_caught(text, &["internal", "G-single"]);
}

#[test]
fn lists_real_time() {
    let stale = "c1.1 ok  0 10 | a x 1
                 c2.1 ok  0 40 | r x 1
                 c3.1 ok 20 30 | !r x";
    caught(stale, &["G-single-realtime"], &[]);
    let lost = "c1.1 ok  0 10 | a x 1
                c3.1 ok 20 30 | !r x";
    caught(lost, &["lost-append-realtime"], &[]);
    let backwards = "c1.1 ok 20 30 | a x 1
                     c2.1 ok  0 10 | a x 2
                     c3.1 ok  0 50 | !r x 1 2";
    caught(backwards, &["G0-realtime"], &[]);
    let future = "c1.1 ok  0 10 | !r x 1
                  c2.1 ok 20 30 | a x 1";
    caught(future, &["G1c-realtime"], &[]);
    let skew = "c1.1 ok 20 30 | r x
                c2.1 ok  0 40 | a x 1 | !r y
                c3.1 ok  0 10 | a y 1";
    caught(skew, &["G2-item-realtime"], &[]);
}

#[test]
fn lists_process() {
    let stale = "c1.1 ok  0 10 | a x 1
                 c2.1 ok  0 40 | r x 1
                 c1.2 ok 20 30 | !r x";
    caught(stale, &["G-single-process"], &[]);
    let lost = "c1.1 ok  0 10 | a x 1
                c1.2 ok 20 30 | !r x";
    caught(lost, &["lost-append-process"], &[]);
    let backwards = "c1.1 ok  0 10 | a x 1
                     c1.2 ok 20 30 | a x 2
                     c3.1 ok  0 50 | !r x 2 1";
    caught(backwards, &["G0-process"], &[]);
    let future = "c1.1 ok  0 10 | !r x 1
                  c1.2 ok 20 30 | a x 1";
    caught(future, &["G1c-process"], &[]);
    let skew = "c1.2 ok 20 30 | r x
                c2.1 ok  0 40 | a x 1 | !r y
                c1.1 ok  0 10 | a y 1";
    caught(skew, &["G2-item-process"], &[]);
    // One client ran them concurrently, so they have no order.
    let pipelined = "c1.1 ok 0 10 | a x 1
                     c1.2 ok 5 30 | r x
                     c1.3 ok 10 30 | r x | !r y 9";
    always_caught(pipelined, &["garbage-read"]);
}

#[test]
fn unknown_outcomes_of_appends() {
    // Never seen: it may never have happened, or come later.
    assert!(judge("c1.1 info 0 5 | a x 1 \n c2.1 ok 6 9 | r x", Model::StrictSerializable).ok);
    // Seen long after the client gave up: it committed, at any time after its invocation.
    let text = "c1.1 info  0  5 | a x 1
                c2.1 ok   10 20 | r x
                c3.1 ok   30 40 | r x 1";
    let verdict = judge(text, Model::StrictSerializable);
    assert!(verdict.ok, "{verdict}");
    assert_eq!((verdict.transactions.info, verdict.transactions.info_committed), (1, 1));
    // Once seen it stays.
    let text = "c1.1 info  0  5 | a x 1
                c2.1 ok   10 20 | r x 1
                c3.1 ok   30 40 | !r x";
    caught(text, &["G-single-realtime"], &[]);
    // It cannot take effect before it was invoked.
    let text = "c1.1 info 20 25 | a x 1
                c2.1 ok   10 15 | !r x 1";
    caught(text, &["G1c-realtime"], &[]);
    // Its other writes happened too, and its reads count.
    let text = "c1.1 info 0 5 | a x 1 | a y 1
                c2.1 ok   0 9 | r x 1 | !r y";
    always_caught(text, &["G-single"]);
    let text = "c1.1 info 0 5 | a x 1 | r y 2
                c2.1 info 0 5 | a y 2
                c3.1 ok   0 9 | r x 1 | !r y";
    always_caught(text, &["G-single"]);
    // The reads of an attempt whose writes nobody saw do not count.
    assert!(judge("c1.1 info 0 5 | r x 7 \n c2.1 fail 0 5 | r x 8", Model::Serializable).ok);
}

#[test]
fn versions_dependencies() {
    let text = "c1.1 ok 0 9 | w x 5 | !v y c2.1@6
                c2.1 ok 0 9 | v x c1.1@5 | w y 6";
    always_caught(text, &["G1c"]);
    let text = "c1.1 ok 0 9 | w x 5 | w y 5
                c2.1 ok 0 9 | !v x c0.0@0 | v y c1.1@5";
    always_caught(text, &["G-single"]);
    let lost_update = "c1.1 ok 0 9 | v x c0.0@0 | w x 5
                       c2.1 ok 0 9 | !v x c0.0@0 | w x 6";
    always_caught(lost_update, &["G-single"]);
    let text = "c1.1 ok 0 9 | v x c0.0@0 | w y 5
                c2.1 ok 0 9 | !v y c0.0@0 | w x 6";
    always_caught(text, &["G2-item"]);
    let text = "c1.1 fail 0 9 | w x ?
                c2.1 ok   0 9 | !v x c1.1@5";
    always_caught(text, &["G1a"]);
    let text = "c1.1 ok 0 9 | w x 5
                c2.1 ok 0 9 | !w x 5";
    always_caught(text, &["timestamp-tie"]);
    // Blind writes, and a read-modify-write after them.
    let text = "c1.1 ok 0 9 | w x 5
                c2.1 ok 0 9 | w x 6
                c3.1 ok 0 9 | v x c2.1@6 | w x 7 | !v y c9.9@1";
    always_caught(text, &["garbage-read"]);
}

#[test]
fn versions_that_cannot_be() {
    for text in [
        "c2.1 ok 0 9 | !v x c1.1@5",
        "c2.1 ok 0 9 | !v x c0.0@5",
        "c1.1 ok 0 9 | w x 6 \n c2.1 ok 0 9 | !v x c1.1@5",
        "c1.1 ok 0 9 | w y 5 \n c2.1 ok 0 9 | !v x c1.1@5",
        "c1.1 info 0 9 | w x ? \n c2.1 ok 0 9 | v x c1.1@5 \n c3.1 ok 0 9 | !v x c1.1@6",
    ] {
        always_caught(text, &["garbage-read"]);
    }
    for text in [
        "c1.1 ok 0 9 | !v x c1.1@5 | w x 5",
        "c1.1 ok 0 9 | !v x c1.1@5",
        "c1.1 ok 0 9 | w x 5 | !v x c1.1@6",
        "c1.1 ok 0 9 | w x 5 | !v x c0.0@0",
        "c1.1 ok 0 9 | w x 5 \n c2.1 ok 0 9 | v x c1.1@5 | !v x c0.0@0",
    ] {
        always_caught(text, &["internal"]);
    }
    assert!(judge("c1.1 ok 0 9 | v x c0.0@0 | w x 5 | v x c1.1@5", Model::Serializable).ok);
}

#[test]
fn versions_in_time() {
    let backwards = "c1.1 ok 20 30 | !w x 5
                     c2.1 ok  0 10 | w x 6";
    caught(backwards, &["G0-realtime"], &[]);
    let future = "c1.1 ok  0 10 | !v x c2.1@5
                  c2.1 ok 20 30 | w x 5";
    caught(future, &["G1c-realtime"], &[]);
    let stale = "c1.1 ok  0 10 | w x 5
                 c2.1 ok 20 30 | !v x c0.0@0";
    caught(stale, &["G-single-realtime"], &[]);
    let stale = "c1.1 ok  0 10 | w x 5
                 c1.2 ok 20 30 | !v x c0.0@0";
    caught(stale, &["G-single-process"], &[]);
    let skew = "c1.1 ok 20 30 | v x c0.0@0
                c2.1 ok  0 40 | w x 5 | !v y c0.0@0
                c3.1 ok  0 10 | w y 4";
    caught(skew, &["G2-item-realtime"], &[]);
}

#[test]
fn unknown_outcomes_of_versions() {
    // The reader states the timestamp, which places the writer's other versions too.
    let text = "c1.1 info 0 5 | w x ? | w y ?
                c2.1 ok   0 9 | v x c1.1@5 | !v y c0.0@0";
    always_caught(text, &["G-single"]);
    let text = "c1.1 info  0  5 | w x ?
                c2.1 ok   10 20 | v x c0.0@0
                c3.1 ok   30 40 | v x c1.1@5 | !v z c1.1@5";
    always_caught(text, &["garbage-read"]);
    // Committed, but nobody knows at which timestamp: the verdict is reported as incomplete.
    let verdict =
        judge("c1.1 ok 0 5 | w x ? \n c2.1 ok 6 9 | v x c0.0@0", Model::StrictSerializable);
    assert!(verdict.ok);
    assert_eq!(verdict.unplaced_writes, 1);
    assert!(verdict.to_string().contains("incomplete: 1 committed"));
    // The outcome is unknown, the timestamp is stated, and nobody read it: it may never have
    // happened.
    assert!(
        judge("c1.1 info 0 5 | w x 5 \n c2.1 ok 6 9 | v x c0.0@0", Model::StrictSerializable).ok
    );
}

#[test]
fn reasons_name_keys_values_and_times() {
    let text = "c5.2  ok  0  10 | r k7 3 | a k7 12
                c1.1  ok  0  10 | a k7 3
                c9.1  ok 11  20 | r k7 3 12
                c4.19 ok 15  30 | r k7 3";
    let verdict = judge(text, Model::StrictSerializable);
    let text = verdict.to_string();
    let expected = "\
strict-serializable: FAILED; 4 committed, 0 aborted, 0 unknown

G-single-realtime: each of c5.2, c4.19 must come before the next, and the last before the first
  1. c5.2 before c4.19: c5.2 completed at 10 ms before c4.19 was invoked at 15 ms (real time)
  2. c4.19 before c5.2: c4.19 read k7=[3] and missed 12, which c5.2 appended (rw)
";
    assert_eq!(text, expected);
    let json = serde_json::to_value(&verdict).unwrap();
    assert_eq!(json["model"], "strict-serializable");
    assert_eq!(json["ok"], false);
    assert_eq!(json["transactions"]["ok"], 4);
    assert_eq!(json["anomalies"][0]["kind"], "G-single-realtime");
    assert_eq!(json["anomalies"][0]["cycle"][1]["from"], "c4.19");
    assert_eq!(json["anomalies"][0]["cycle"][1]["dependency"], "rw");
}

#[test]
fn reasons_for_every_kind_of_edge() {
    let reasons = |text: &str| {
        let verdict = judge(text, Model::Serializable);
        let steps = verdict.anomalies.iter().flat_map(|anomaly| anomaly.cycle.clone());
        steps.map(|step| step.reason).collect::<Vec<_>>()
    };
    let g0 = "c1.1 ok 0 9 | a x 1 | a y 1 \n c2.1 ok 0 9 | a x 2 | a y 2
              c3.1 ok 0 9 | r x 1 2 \n c4.1 ok 0 9 | r y 2 1";
    let expected = [
        "c1.1 appended 1 to x before c2.1 appended 2 (ww)",
        "c2.1 appended 2 to y before c1.1 appended 1 (ww)",
    ];
    assert_eq!(reasons(g0), expected);
    let tail = "c1.1 ok 0 9 | a x 1 | r y 2 \n c2.1 ok 0 9 | a x 2 | a y 2 \n c3.1 ok 0 9 | r x 1";
    let expected = [
        "c1.1 appended 1 to x, and the longest list read there lacks 2, which c2.1 appended (ww)",
        "c1.1 read y=[2] and saw 2, which c2.1 appended (wr)",
    ];
    assert_eq!(reasons(tail)[..2], expected);
    let versions = "c1.1 ok 0 9 | w x 5 | v y c2.1@6 \n c2.1 ok 0 9 | w x 6 | w y 6";
    let expected =
        ["c1.1 wrote x at 5, before c2.1 did at 6 (ww)", "c1.1 read y as c2.1 wrote it at 6 (wr)"];
    assert_eq!(reasons(versions), expected);
    let versions = "c1.1 ok 0 9 | w x 5 | v y c0.0@0 \n c2.1 ok 0 9 | v x c0.0@0 | w y 6";
    let expected = [
        "c1.1 read y as its initial version and missed what c2.1 wrote at 6 (rw)",
        "c2.1 read x as its initial version and missed what c1.1 wrote at 5 (rw)",
    ];
    assert_eq!(reasons(versions), expected);
}

#[test]
fn the_shortest_cycle_is_shown() {
    // A cycle of ten write skews with a chord that closes a cycle of three.
    let mut text = String::new();
    for number in 0..10 {
        let chord = if number == 2 { "| r k0" } else { "" };
        let next = (number + 1) % 10;
        text += &format!("c{}.1 ok 0 9 | r k{next} | a k{number} 1 {chord}\n", number + 1);
    }
    let verdict = judge(&text, Model::Serializable);
    assert_eq!(kinds(&verdict), ["G2-item"]);
    let anomaly = verdict.anomalies.first().unwrap();
    let txns: Vec<String> = anomaly.cycle.iter().map(|step| step.from.to_string()).collect();
    assert_eq!(txns, ["c1.1", "c2.1", "c3.1"], "{verdict}");
}

#[test]
fn findings_are_bounded_but_counted() {
    let mut text = String::new();
    for number in 0..100 {
        text += &format!("c1.{} ok 0 9 | r a{number} | a b{number} 1\n", number + 1);
        text += &format!("c2.{} ok 0 9 | r b{number} | a a{number} 1 | r z 7\n", number + 1);
        text += &format!("c3.{} ok 0 9 | r g{number} 3\n", number + 1);
    }
    let verdict = judge(&text, Model::Serializable);
    assert!(!verdict.ok);
    assert_eq!(verdict.anomalies.len(), 2 * super::MAX_OF_A_KIND);
    // 100 cycles, 100 elements of garbage in keys of their own and one in a key that many read.
    assert_eq!(verdict.unreported, 201 - verdict.anomalies.len() as u64);
    assert!(verdict.to_string().contains("more anomalies"));
}

#[test]
fn a_deep_history_needs_no_deep_stack() {
    let mut text = String::from("c1.1 ok 0 1 | a k1 1\n");
    for number in 2..200_000 {
        let (invoke, complete) = (2 * number, 2 * number + 1);
        let before = number - 1;
        text += &format!("c1.{number} ok {invoke} {complete} | r k{before} 1 | a k{number} 1\n");
    }
    assert!(judge(&text, Model::StrictSerializable).ok);
    // The last append makes the whole history one cycle.
    text += "c2.1 ok 0 1 | r k199999 1 | r k1\n";
    let verdict = judge(&text, Model::Serializable);
    assert_eq!(kinds(&verdict), ["G-single"]);
    assert_eq!(verdict.anomalies[0].cycle.len(), 200_000);
}

/// What a stale read may miss, and what no read may miss.
#[test]
fn a_stale_read_must_see_one_consistent_state() {
    // Commits that were acknowledged before it began; and two stale reads that disagree on
    // independent transactions.
    for text in [
        "c1.1 ok 0 1 | a x 1
         c2.1 stale 5 9 | r x",
        "c1.1 ok 0 1 | a x 1
         c2.1 ok 0 1 | a y 1
         c3.1 stale 5 9 | r x 1 | r y
         c4.1 stale 5 9 | r x | r y 1",
        "c1.1 ok 0 1 | w x 5
         c2.1 ok 3 4 | w y 7
         c3.1 stale 5 9 | v x c0.0@0 | v y c2.1@7",
    ] {
        for model in [Model::StrictSerializable, Model::Serializable] {
            let verdict = judge(text, model);
            assert!(verdict.ok, "{verdict}");
            assert!(verdict.transactions.stale > 0 && verdict.to_string().contains("stale reads"));
            assert!(!judge(&text.replace("stale", "ok"), Model::StrictSerializable).ok);
        }
    }
    // Half of a transaction.
    let text = "c1.1 ok 0 9 | a x 1 | a y 1
                c2.1 stale 0 9 | r x 1 | !r y";
    always_caught(text, &["G-single"]);
    // It sees the write of a transaction whose own reads it has not seen.
    let text = "c1.1 ok 0 1 | w x 5
                c1.2 ok 2 3 | v x c1.1@5 | w y 7
                c5.1 ok 2 3 | v x c1.1@5 | v y c1.2@7
                c2.1 stale 0 9 | v y c1.2@7 | !v x c0.0@0";
    always_caught(text, &["G-single"]);
    // Through several keys and other readers of the same versions.
    let text = "c1.1 ok 0 1 | a x 1
                c1.2 ok 2 3 | r x 1 | a y 1
                c5.1 ok 0 3 | r x | a z 1
                c1.3 ok 4 5 | r y 1 | a w 1
                c2.1 stale 0 9 | r w 1 | !r x";
    always_caught(text, &["G-single"]);
}

/// Reads of aborted attempts are judged too, but only against what their client already knew.
#[test]
fn reads_older_than_the_client_knows_are_anomalies() {
    for (text, kind) in [
        ("c1.1 ok 0 1 | a x 1\nc1.2 fail 2 3 | !r x", "read-your-writes"),
        ("c1.1 ok 0 1 | a x 1\nc2.1 ok 2 3 | r x 1\nc1.2 fail 2 3 | !r x", "read-your-writes"),
        ("c1.1 ok 0 1 | w x 5\nc1.2 fail 2 3 | !v x c0.0@0", "read-your-writes"),
        ("c2.1 ok 0 1 | a x 1\nc1.1 ok 2 3 | r x 1\nc1.2 fail 4 5 | !r x", "monotonic-reads"),
        (
            "c2.1 ok 0 1 | w x 5\nc1.1 ok 2 3 | v x c2.1@5\nc1.2 info 4 - | !v x c0.0@0",
            "monotonic-reads",
        ),
        // Reads of old states, too.
        ("c1.1 ok 0 1 | a x 1\nc1.2 stale 2 3 | !r x", "read-your-writes"),
        ("c2.1 ok 0 1 | a x 1\nc1.1 stale 2 3 | r x 1\nc1.2 stale 4 5 | !r x", "monotonic-reads"),
        // A list that holds something that never committed is as long as what committed of it.
        ("c1.1 ok 0 1 | a x 1\nc2.1 fail 0 9 | a x 2\nc1.2 fail 2 3 | !r x 2", "read-your-writes"),
    ] {
        caught(text, &[kind], &[]);
    }
    for text in [
        // Another client; an attempt that was invoked earlier; a commit that was not acknowledged.
        "c1.1 ok 0 1 | a x 1\nc2.1 fail 2 3 | r x",
        "c1.1 ok 0 2 | a x 1\nc1.2 fail 1 3 | r x",
        "c1.1 info 0 - | a x 1\nc1.2 fail 2 3 | r x",
        // What an aborted attempt read may never have existed.
        "c2.1 fail 0 9 | a x 1\nc1.1 fail 0 1 | r x 1\nc1.2 fail 2 3 | r x",
        "c1.1 ok 0 1 | a x 1\nc1.2 fail 2 3 | r x 1 | a x 2\nc1.3 fail 4 5 | r x 1",
    ] {
        let verdict = judge(text, Model::StrictSerializable);
        assert!(verdict.ok, "{verdict}");
    }
}

#[test]
fn models_and_kinds_have_names() {
    for model in [Model::StrictSerializable, Model::Serializable] {
        assert_eq!(model.to_string().parse(), Ok(model));
    }
    let error = "linear".parse::<Model>().unwrap_err().to_string();
    assert_eq!(
        error,
        "\"linear\" is not a consistency model; use strict-serializable or serializable"
    );
    let kind = Kind { phenomenon: Phenomenon::G2Item, order: Some(Order::Process) };
    assert_eq!(kind.to_string(), "G2-item-process");
    assert!(check(&History::new(), Model::StrictSerializable).ok);
}

#[test]
fn versions_a_deletion_is_a_version() {
    let text = "c1.1 ok  0  4 | w x 5
                c2.1 ok  5  9 | d x 6
                c3.1 ok 10 14 | !v x c1.1@5";
    caught(text, &["G-single-realtime"], &[]);
    let text = "c1.1 ok  0  4 | w x 5
                c2.1 ok  5  9 | d x 6 | d y 6
                c3.1 ok  5 14 | v y c2.1@6 | !v x c1.1@5";
    always_caught(text, &["G-single"]);
}

#[test]
fn versions_a_forgotten_deletion_is_read_as_the_initial_version() {
    let text = "c1.1 ok  0  4 | w x 5
                c2.1 ok  5  9 | d x 6
                c3.1 ok 10 14 | v x c0.0@0
                c4.1 ok 15 19 | w x 7
                c5.1 ok 20 24 | !v x c0.0@0";
    caught(text, &["G-single-realtime"], &[]);
    // It read nothing, and its own version replaced another one: a lost update.
    let text = "c1.1 ok 0 9 | d x 5
                c2.1 ok 0 9 | w x 6
                c3.1 ok 0 9 | !v x c0.0@0 | w x 7";
    always_caught(text, &["G-single"]);
}

#[test]
fn versions_an_absent_key_that_was_written_in_between_is_still_absent() {
    let text = "c1.1 ok  0  4 | d x 5
                c2.1 ok  5 20 | v x c1.1@5 | v y c4.1@7
                c3.1 ok  6  9 | w x 6
                c4.1 ok 10 14 | d x 7 | w y 7";
    assert!(judge(text, Model::StrictSerializable).ok);
    let verdict = judge(text, Model::Serializable);
    assert!(verdict.ok && verdict.unplaced_reads == 1, "{verdict}");
}

#[test]
fn versions_a_deletion_whose_outcome_is_unknown_may_be_read_as_the_initial_version() {
    let text = "c1.1 ok    0  4 | w x 5
                c2.1 info  5  - | d x ?
                c3.1 ok   10 14 | v x c0.0@0";
    let verdict = judge(text, Model::StrictSerializable);
    assert!(verdict.ok && verdict.unplaced_reads == 1, "{verdict}");
    let text = "c1.1 ok    0  4 | w x 5
                c2.1 info 20  - | d x ?
                c3.1 ok   10 14 | !v x c0.0@0";
    caught(text, &["G-single-realtime"], &[]);
}

/// One deletion has one place: it does not explain two absences with a write between them.
#[test]
fn versions_a_deletion_whose_outcome_is_unknown_has_one_place() {
    let text = "c1.1 ok    0  4 | w x 5
                c2.1 info  5  - | d x ?
                c3.1 ok   10 14 | v x c0.0@0
                c4.1 ok   15 19 | w x 7
                c5.1 ok   20 24 | !v x c0.0@0";
    caught(text, &["G-single-realtime"], &[]);
    // It may have happened after the second write, if nobody saw it before.
    let text = "c1.1 ok    0  4 | w x 5
                c2.1 info  5  - | d x ?
                c4.1 ok   15 19 | w x 7
                c5.1 ok   20 24 | v x c0.0@0";
    assert!(judge(text, Model::StrictSerializable).ok);
    // The writer replaced what the deletion left, and the deletion cannot come again.
    let text = "c1.1 ok    0  4 | w x 5
                c2.1 info  5  - | d x ?
                c3.1 ok   10 14 | v x c0.0@0 | w x 7
                c4.1 ok   20 24 | !v x c0.0@0";
    caught(text, &["G-single-realtime"], &[]);
    // Two deletions explain two absences.
    let text = "c1.1 ok    0  4 | w x 5
                c2.1 info  5  - | d x ?
                c6.1 info  5  - | d x ?
                c3.1 ok   10 14 | v x c0.0@0
                c4.1 ok   15 19 | w x 7
                c5.1 ok   20 24 | v x c0.0@0";
    assert!(judge(text, Model::StrictSerializable).ok);
}

/// Scans are read-only transactions. Their histories have a read of an absent key for every key of
/// the range that they did not find.
#[test]
fn a_scan_that_misses_a_key_of_a_transaction_that_it_saw_is_caught() {
    let text = "c1.1 ok 0 9 | a k1 1 | a k3 1
                c2.1 ok 0 9 | r k1 1 | r k2 | !r k3";
    always_caught(text, &["G-single"]);
    // Also with versions, where the key was created, deleted, and created again.
    let text = "c1.1 ok 0 1 | w k1 1
                c1.2 ok 2 3 | d k1 2
                c1.3 ok 4 9 | w k1 3 | w k2 3
                c2.1 ok 4 9 | !v k1 c0.0@0 | v k2 c1.3@3";
    always_caught(text, &["G-single"]);
}

#[test]
fn a_scan_that_misses_an_acknowledged_key_is_caught() {
    let text = "c1.1 ok 0 4 | a k1 1
                c2.1 ok 5 9 | !r k1 | r k2";
    caught(text, &["lost-append-realtime"], &[]);
    let text = "c1.1 ok 0 4 | w k1 5
                c2.1 ok 5 9 | !v k1 c0.0@0 | v k2 c0.0@0";
    caught(text, &["G-single-realtime"], &[]);
}
