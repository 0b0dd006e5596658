//! Every decision of TAPIR, as functions of facts (R7): what the replicas' votes mean for the
//! gateway, for a node that takes over, and for a view change; and the outcome of the transaction.

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Outcome};

use super::message::{Answer, Ballot, Cast, Image, Vote};
use super::state::Entry;
use crate::ir::{Gathered, Quorums};

/// The meaning of one participant's answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tally {
    /// More answers are needed.
    Wait,
    /// The result is agreed, and will never change. True if it was agreed on the fast path.
    Chosen(Vote, bool),
    /// This result may be proposed. It is agreed once f + 1 replicas have accepted it.
    Propose(Vote),
    /// The transaction could commit at a later timestamp.
    Later(Timestamp),
    /// Another node took over, with this ballot.
    Preempted(Ballot),
    /// The transaction has ended.
    Ended(Outcome),
    /// So many replicas have forgotten the transaction that it cannot commit any more, and that its
    /// outcome cannot be found out.
    Forgotten,
    /// The fast path may have agreed on a commit that too few of the answering replicas can
    /// confirm. A view change finds out (only if f ≥ 2).
    Uncertain,
}

/// The answers of the latest view: no others count together (R5).
fn latest(answers: &OrdMap<NodeId, Answer>) -> impl Iterator<Item = &Answer> + Clone {
    let view = answers.values().map(|answer| answer.view).max().unwrap_or_default();
    answers.values().filter(move |answer| answer.view == view)
}

/// True if f + 1 replicas have forgotten the transaction.
fn is_forgotten(quorums: Quorums, answers: &OrdMap<NodeId, Answer>) -> bool {
    answers.values().filter(|answer| answer.is_forgotten).count() >= quorums.slow()
}

/// The result that f + 1 replicas have accepted in one view, and in one ballot that is not below
/// `ballot`. Other replicas may not have seen a result in a lower ballot, and act on later ones.
fn accepted(quorums: Quorums, ballot: Ballot, answers: &OrdMap<NodeId, Answer>) -> Option<Vote> {
    let is_wanted = |cast: &Cast| cast.is_final && cast.ballot >= ballot;
    let finals = || latest(answers).filter_map(|answer| answer.cast.filter(is_wanted));
    let by = |cast: &Cast| finals().filter(|c| c == cast).count();
    finals().find(|cast| by(cast) >= quorums.slow()).map(|cast| cast.vote)
}

/// The gateway's view of one participant (§3.1 "Client" with TAPIR-DECIDE, Fig. 10). `ballot` is
/// its round, and `expected` is the number of further replicas whose vote may arrive soon.
///
/// f + 1 `PrepareOk` decide, whatever the other votes are: a node that takes over may see only
/// those, and must get the same result (R2).
#[must_use]
pub fn settle(
    quorums: Quorums,
    ballot: Ballot,
    answers: &OrdMap<NodeId, Answer>,
    expected: usize,
) -> Tally {
    if let Some(outcome) = answers.values().find_map(|answer| answer.ended) {
        return Tally::Ended(outcome);
    }
    if let Some(vote) = accepted(quorums, ballot, answers) {
        return Tally::Chosen(vote, false);
    }
    if is_forgotten(quorums, answers) {
        return Tally::Forgotten;
    }
    let votes: Vec<Vote> = latest(answers)
        .filter_map(|answer| answer.cast.filter(|cast| cast.ballot == ballot))
        .map(|cast| cast.vote)
        .collect();
    let (first_ok, ok) = most_common_ok(votes.iter().copied());
    if let Some(vote) = first_ok
        && ok >= quorums.fast()
    {
        return Tally::Chosen(vote, true);
    }
    let refusals = votes.iter().filter(|vote| !vote.is_ok());
    let later = votes.iter().filter_map(|vote| match vote {
        Vote::Retry(at) => Some(*at),
        Vote::PrepareOk(_) | Vote::Abort | Vote::Abstain | Vote::Refused(_) => None,
    });
    let refused = refusals.clone().count();
    let can_come_later = ok + later.clone().count() >= quorums.slow();
    let worst = refusals.copied().max_by_key(|vote| severity(*vote));
    if let Some(vote) = worst
        && refused >= quorums.settled()
        && !can_come_later
    {
        return Tally::Chosen(vote, true);
    }
    if let Some(preempted) = answers.values().map(|a| a.promised).max()
        && preempted > ballot
    {
        return Tally::Preempted(preempted);
    }
    let outstanding = expected.min(quorums.replicas() - votes.len());
    if votes.len() < quorums.slow() || ok + outstanding >= quorums.fast() {
        return Tally::Wait;
    }
    match (first_ok, worst) {
        (Some(vote), _) if ok >= quorums.slow() => Tally::Propose(vote),
        _ if ok + outstanding >= quorums.slow() && outstanding > 0 => Tally::Wait,
        _ if can_come_later => Tally::Later(later.max().unwrap_or_default()),
        (_, Some(vote)) => Tally::Propose(vote),
        (_, None) => Tally::Wait,
    }
}

/// The commit that most replicas voted for, and their number.
fn most_common_ok(votes: impl Iterator<Item = Vote> + Clone) -> (Option<Vote>, usize) {
    let count = |vote: Vote| votes.clone().filter(|other| *other == vote).count();
    let ok = votes.clone().filter(|vote| vote.is_ok());
    let most = ok.max_by_key(|vote| count(*vote));
    (most, most.map_or(0, count))
}

/// Of several refusals, the one with the highest severity gives the reason.
fn severity(vote: Vote) -> u8 {
    match vote {
        Vote::PrepareOk(_) => 0,
        Vote::Retry(_) => 1,
        Vote::Abstain => 2,
        Vote::Abort => 3,
        Vote::Refused(_) => 4,
    }
}

/// The view of a node that took over with `ballot` (§5.2.3): the result that must be proposed,
/// given one participant's answers. It never prepares again (R1): what was not agreed is refused.
#[must_use]
pub fn recover(quorums: Quorums, ballot: Ballot, answers: &OrdMap<NodeId, Answer>) -> Tally {
    if let Some(outcome) = answers.values().find_map(|answer| answer.ended) {
        return Tally::Ended(outcome);
    }
    if let Some(vote) = accepted(quorums, ballot, answers) {
        return Tally::Chosen(vote, false);
    }
    if is_forgotten(quorums, answers) {
        return Tally::Forgotten;
    }
    if let Some(preempted) = answers.values().map(|a| a.promised).max()
        && preempted > ballot
    {
        return Tally::Preempted(preempted);
    }
    let is_promise = |answer: &&Answer| answer.promised == ballot && !answer.is_forgotten;
    let promises: Vec<&Answer> = latest(answers).filter(is_promise).collect();
    if promises.len() < quorums.slow() {
        return Tally::Wait;
    }
    let casts: Vec<Cast> = promises.iter().filter_map(|answer| answer.cast).collect();
    let unseen = quorums.replicas() - promises.len();
    match merge_casts(&casts) {
        Merged::Settled(vote, _) => Tally::Propose(vote),
        Merged::Tentative { vote, ok, .. } if ok >= quorums.slow() => Tally::Propose(vote),
        Merged::Tentative { ok, .. } if ok + unseen >= quorums.fast() => Tally::Uncertain,
        Merged::Tentative { .. } | Merged::Nothing => {
            Tally::Propose(Vote::Refused(AbortReason::Recovery))
        }
    }
}

/// The meaning of several replicas' votes on one transaction, before quorums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Merged {
    /// No votes.
    Nothing,
    /// It was settled in the highest ballot.
    Settled(Vote, Ballot),
    /// In the highest ballot, this many replicas would commit it.
    Tentative { vote: Vote, ok: usize, ballot: Ballot },
}

/// Only votes of the highest ballot count. A gateway that asked in a later round had given up the
/// earlier one, and a node that took over knew everything that could have been agreed before.
fn merge_casts(casts: &[Cast]) -> Merged {
    let Some(ballot) = casts.iter().map(|cast| cast.ballot).max() else { return Merged::Nothing };
    let in_ballot = || casts.iter().filter(|cast| cast.ballot == ballot);
    if let Some(settled) = in_ballot().find(|cast| cast.is_final) {
        return Merged::Settled(settled.vote, ballot);
    }
    match most_common_ok(in_ballot().map(|cast| cast.vote)) {
        (Some(vote), ok) => Merged::Tentative { vote, ok, ballot },
        (None, _) => Merged::Settled(Vote::Refused(AbortReason::Recovery), ballot),
    }
}

/// IR-MERGE-RECORDS with TAPIR-MERGE (§3.2.2, Fig. 11): merges f + 1 records into one, with a
/// settled result for every operation.
///
/// A commit that the fast path may have agreed on stands, unless it contradicts a commit that was
/// certainly agreed on: then it was not agreed. A transaction that too few replicas have prepared
/// is refused. The paper validates it again, but its gateway may already have reported a refusal
/// (R2).
#[must_use]
pub fn merge(quorums: Quorums, gathered: &Gathered<'_, Image>) -> Image {
    let mut merged = OrdMap::<TxnId, Entry>::new();
    let mut acknowledged = OrdMap::new();
    // One of these replicas remembers every timestamp that f + 1 replicas were read at.
    let ceiling = gathered.all.iter().map(|(_, offer)| offer.image.ceiling).max();
    for (_, offer) in &gathered.all {
        for (txn, theirs) in &offer.image.entries {
            let entry = merged.entry(*txn).or_default();
            if entry.participants.is_empty() {
                entry.participants.clone_from(&theirs.participants);
            }
            if entry.part.is_none() {
                entry.part.clone_from(&theirs.part);
            }
            entry.promised = entry.promised.max(theirs.promised);
            entry.ended = entry.ended.or(theirs.ended);
        }
        for &(client, below) in &offer.image.acknowledged {
            let known = acknowledged.entry(client).or_insert(below);
            *known = below.max(*known);
        }
    }
    let mut casts = OrdMap::<TxnId, Vec<Cast>>::new();
    for (_, offer) in &gathered.latest {
        for (txn, entry) in &offer.image.entries {
            casts.entry(*txn).or_default().extend(entry.cast);
        }
    }
    let mut revived = Vec::new();
    for (txn, entry) in merged.iter_mut().filter(|(_, entry)| entry.ended.is_none()) {
        let casts = casts.get(txn).map_or(&[][..], Vec::as_slice);
        let refused = Vote::Refused(AbortReason::Recovery);
        let (vote, ballot) = match merge_casts(casts) {
            Merged::Settled(vote, ballot) => (vote, ballot),
            Merged::Tentative { vote, ok, ballot } if ok >= quorums.slow() => (vote, ballot),
            Merged::Tentative { vote, ok, ballot } if ok >= quorums.revive() => {
                revived.push((*txn, vote, ballot));
                continue;
            }
            Merged::Tentative { ballot, .. } => (refused, ballot),
            Merged::Nothing => (refused, entry.promised),
        };
        entry.cast = Some(Cast { ballot, vote, is_final: true });
    }
    for (txn, vote, ballot) in revived {
        let is_contradicted = merged.get(&txn).is_none_or(|entry| {
            let others = merged.iter().filter(|(other, _)| **other != txn);
            others.filter_map(|(_, other)| Some((other, committed_at(other)?))).any(
                |(other, at)| match vote {
                    Vote::PrepareOk(mine) => contradict((entry, mine), (other, at)),
                    Vote::Abort | Vote::Abstain | Vote::Retry(_) | Vote::Refused(_) => false,
                },
            )
        });
        let vote = if is_contradicted { Vote::Refused(AbortReason::Conflict) } else { vote };
        if let Some(entry) = merged.get_mut(&txn) {
            entry.cast = Some(Cast { ballot, vote, is_final: true });
        }
    }
    Image {
        entries: merged.into_iter().collect(),
        acknowledged: acknowledged.into_iter().collect(),
        ceiling: ceiling.unwrap_or_default(),
    }
}

/// The timestamp at which a transaction commits, if its record says that it does.
fn committed_at(entry: &Entry) -> Option<Timestamp> {
    match entry.ended {
        Some(Outcome::Committed(timestamp)) => Some(timestamp),
        Some(Outcome::Aborted(_) | Outcome::Unknown) => None,
        None => entry.prepared_at(),
    }
}

/// True if no replica can have prepared both transactions: one would have had to read a key that
/// the other writes, or they write one key at the same timestamp. It follows
/// [`super::occ::Validator::check`].
fn contradict(one: (&Entry, Timestamp), other: (&Entry, Timestamp)) -> bool {
    let misses = |(reader, reads_at): (&Entry, Timestamp), (writer, at): (&Entry, Timestamp)| {
        let (Some(reader), Some(writer)) = (&reader.part, &writer.part) else { return false };
        reader.reads.iter().any(|(key, version)| {
            version.timestamp < at && at <= reads_at && writer.writes.contains_key(key)
        })
    };
    let is_one_write = |(one, at): (&Entry, Timestamp), (other, other_at): (&Entry, Timestamp)| {
        let (Some(one), Some(other)) = (&one.part, &other.part) else { return false };
        at == other_at && one.writes.keys().any(|key| other.writes.contains_key(key))
    };
    misses(one, other) || misses(other, one) || is_one_write(one, other)
}

/// The outcome of a transaction whose participants have agreed on these results: the only decision
/// function (R7). None while it is open.
#[must_use]
pub fn decide(
    participants: impl IntoIterator<Item = PartitionId> + Clone,
    chosen: impl Fn(PartitionId) -> Option<Vote>,
) -> Option<Outcome> {
    for partition in participants.clone() {
        if let Some(vote) = chosen(partition)
            && !vote.is_ok()
        {
            return Some(Outcome::Aborted(vote.reason()));
        }
    }
    let mut agreed = None;
    let mut is_mixed = false;
    for partition in participants {
        let Vote::PrepareOk(timestamp) = chosen(partition)? else { return None };
        is_mixed |= agreed.is_some_and(|other| other != timestamp);
        agreed = Some(timestamp);
    }
    // A gateway that tried a later timestamp did not reach all participants, so it reported
    // nothing.
    if is_mixed {
        return Some(Outcome::Aborted(AbortReason::Recovery));
    }
    agreed.map(Outcome::Committed)
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::txn::{Key, Version};

    use super::*;
    use crate::ir::{Gathering, Offer, View};
    use crate::tapir::message::Part;

    const AT: Timestamp = Timestamp(100);

    fn answer(view: u64, vote: Vote, is_final: bool) -> Answer {
        let ballot = Ballot::client(0);
        Answer {
            view: View(view),
            promised: ballot,
            cast: Some(Cast { ballot, vote, is_final }),
            ended: None,
            absent: vec![],
            is_forgotten: false,
        }
    }

    fn answers(votes: &[Vote]) -> OrdMap<NodeId, Answer> {
        (1..).map(NodeId).zip(votes.iter().map(|&vote| answer(1, vote, false))).collect()
    }

    fn client(replicas: usize, votes: &[Vote], is_complete: bool) -> Tally {
        let expected = if is_complete { 0 } else { replicas };
        settle(Quorums::of(replicas), Ballot::client(0), &answers(votes), expected)
    }

    const OK: Vote = Vote::PrepareOk(AT);
    const NO: Vote = Vote::Abstain;
    const RETRY: Vote = Vote::Retry(Timestamp(200));

    #[test]
    fn the_client_takes_the_fast_path_while_it_can_and_the_slow_path_as_soon_as_it_cannot() {
        assert_eq!(client(3, &[OK, OK], false), Tally::Wait);
        assert_eq!(client(3, &[OK, OK, OK], false), Tally::Chosen(OK, true));
        assert_eq!(client(3, &[OK, OK], true), Tally::Propose(OK));
        assert_eq!(client(3, &[OK, NO, OK], false), Tally::Propose(OK));
        assert_eq!(client(3, &[OK, NO], false), Tally::Wait);
        assert_eq!(client(3, &[OK, NO], true), Tally::Propose(NO));
        assert_eq!(client(3, &[NO, NO], false), Tally::Chosen(NO, true));
        assert_eq!(client(3, &[OK, RETRY, Vote::Abort], false), Tally::Later(Timestamp(200)));
        assert_eq!(client(3, &[RETRY, RETRY], false), Tally::Later(Timestamp(200)));
        assert_eq!(client(5, &[OK, OK, OK, OK], false), Tally::Chosen(OK, true));
        assert_eq!(client(5, &[OK, OK, OK, NO], false), Tally::Wait);
        assert_eq!(client(5, &[NO, NO, NO, NO], false), Tally::Chosen(NO, true));
        assert_eq!(client(5, &[NO, NO, NO, OK], false), Tally::Propose(NO));
    }

    #[test]
    fn votes_of_two_views_do_not_count_together() {
        let mut votes = answers(&[OK, OK, OK]);
        votes.insert(NodeId(2), answer(2, OK, false));
        let tally =
            |votes: &OrdMap<NodeId, Answer>| settle(Quorums::of(3), Ballot::client(0), votes, 0);
        assert_eq!(tally(&votes), Tally::Wait);
        votes.insert(NodeId(3), answer(2, OK, false));
        assert_eq!(tally(&votes), Tally::Propose(OK));
    }

    /// Every way in which the replicas of a group can vote on one transaction: any f + 1 replicas
    /// that are asked later get the result of the fast path, or are left uncertain.
    #[test]
    fn takeovers_and_merges_agree_with_the_reported_outcome() {
        for replicas in [3_usize, 5, 7] {
            let quorums = Quorums::of(replicas);
            for pattern in 0..1_u32 << replicas {
                let vote = |at: usize| if pattern >> at & 1 == 1 { OK } else { NO };
                let votes: Vec<Vote> = (0..replicas).map(vote).collect();
                let told = client(replicas, &votes, false);
                for heard in 0..1_u32 << replicas {
                    if (heard.count_ones() as usize) < quorums.slow() {
                        continue;
                    }
                    let is_heard = |node: &NodeId| heard >> (node.0 - 1) & 1 == 1;
                    let mut some = answers(&votes);
                    some.retain(|node, _| is_heard(node));
                    let ballot = Ballot { takeover: 1, node: NodeId(9), round: 0 };
                    some.values_mut().for_each(|answer| answer.promised = ballot);
                    let found = recover(quorums, ballot, &some);
                    let merged = merged(quorums, &some);
                    match told {
                        Tally::Chosen(OK, _) => {
                            assert!(matches!(found, Tally::Propose(OK) | Tally::Uncertain));
                            assert_eq!(merged, OK, "{votes:?} {heard:b}");
                        }
                        Tally::Chosen(..) => {
                            assert!(matches!(found, Tally::Propose(Vote::Refused(_))));
                            assert!(!merged.is_ok(), "{votes:?} {heard:b}");
                        }
                        Tally::Wait
                        | Tally::Propose(_)
                        | Tally::Later(_)
                        | Tally::Preempted(_)
                        | Tally::Ended(_)
                        | Tally::Forgotten
                        | Tally::Uncertain => {}
                    }
                }
            }
        }
    }

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    /// The result of a view change over these votes on one transaction.
    fn merged(quorums: Quorums, answers: &OrdMap<NodeId, Answer>) -> Vote {
        let mut gathering = Gathering::default();
        let synced: OrdMap<NodeId, View> = answers.keys().map(|&n| (n, View(1))).collect();
        for (&node, answer) in answers.iter().take(quorums.slow()) {
            let entry = Entry { cast: answer.cast, ..Entry::default() };
            let image = Image { entries: vec![(txn(1), entry)], ..Image::default() };
            let (normal_view, synced) = (View(1), synced.clone());
            let (born, founders) = (Timestamp::ZERO, OrdMap::new());
            let offer = Offer { normal_view, is_whole: true, synced, image, born, founders };
            gathering.add(node, offer);
        }
        let image = merge(quorums, &gathering.ready(quorums).unwrap());
        image.entries[0].1.cast.unwrap().vote
    }

    #[test]
    fn a_fast_commit_that_contradicts_an_agreed_commit_is_dropped() {
        let quorums = Quorums::of(5);
        let key = Key::from("x");
        let version = Version::default();
        let part = |writes: bool| Part {
            reads: vec![(key.clone(), version)],
            writes: if writes { [(key.clone(), None)].into() } else { Default::default() },
        };
        let entry = |at, is_final| Entry {
            part: Some(part(true)),
            cast: Some(Cast {
                ballot: Ballot::client(0),
                vote: Vote::PrepareOk(Timestamp(at)),
                is_final,
            }),
            ..Entry::default()
        };
        let offer = |entries| Offer {
            normal_view: View(1),
            is_whole: true,
            synced: (1..=5).map(|node| (NodeId(node), View(1))).collect(),
            image: Image { entries, ..Image::default() },
            born: Timestamp::ZERO,
            founders: OrdMap::new(),
        };
        // Also at the same timestamp: replicas suggest the same later timestamp to all transactions
        // whose timestamp is too early.
        for (at, is_final, expected) in
            [(90, true, false), (90, false, true), (100, true, false), (110, true, false)]
        {
            let mut gathering = Gathering::default();
            gathering.add(NodeId(1), offer(vec![(txn(1), entry(100, false))]));
            gathering.add(NodeId(2), offer(vec![(txn(1), entry(100, false))]));
            gathering.add(NodeId(3), offer(vec![(txn(2), entry(at, is_final))]));
            let image = merge(quorums, &gathering.ready(quorums).unwrap());
            let vote = image.entries[0].1.cast.unwrap().vote;
            assert_eq!(vote.is_ok(), expected, "{image:?}");
        }
    }

    #[test]
    fn the_outcome_follows_from_what_every_participant_agreed_on() {
        let parts = [PartitionId(0), PartitionId(1)];
        let of = |votes: [Option<Vote>; 2]| decide(parts, |p| votes[p.0 as usize]);
        assert_eq!(of([Some(OK), None]), None);
        assert_eq!(of([None, Some(NO)]), Some(Outcome::Aborted(AbortReason::Conflict)));
        assert_eq!(of([Some(OK), Some(OK)]), Some(Outcome::Committed(AT)));
        let other = Vote::PrepareOk(Timestamp(7));
        assert_eq!(of([Some(OK), Some(other)]), Some(Outcome::Aborted(AbortReason::Recovery)));
    }
}
