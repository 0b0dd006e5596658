//! Commands that combine sorted sets and sets: `ZUNION`, `ZINTER`, `ZDIFF` and their relatives.

use bytes::Bytes;

use super::NO_SUCH_KEY;
use super::number::Score;
use super::parse::Args;
use super::reply::{Failure, NOT_INTEGER, SYNTAX};
use super::sets::Combination;
use super::state::Slot;
use crate::ordered::{OrdMap, OrdSet};
use crate::wire::Wire;

/// The score of a member of several sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Aggregate {
    /// The sum of its scores.
    Sum,
    /// The lowest of them.
    Least,
    /// The highest of them.
    Greatest,
}

/// How several sorted sets become one.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Merge {
    /// Which members it has.
    pub how: Combination,
    /// The keys of the sorted sets and sets.
    pub keys: Vec<u32>,
    /// What the scores of each key are multiplied by; empty if by nothing.
    pub weights: Vec<Score>,
    /// Which score a member has that is in several of them.
    pub aggregate: Aggregate,
}

/// Members with scores, of a sorted set or of a set, whose members all have the score 1.
#[derive(Clone, Copy)]
enum Source<'a> {
    Absent,
    Sorted(&'a OrdMap<Bytes, Score>),
    Set(&'a OrdSet<Bytes>),
}

impl<'a> Source<'a> {
    fn of(slots: &'a [Slot], key: u32) -> Result<Self, Failure> {
        let slot = slots.get(key as usize).ok_or(NO_SUCH_KEY)?;
        if let Ok(members) = slot.set() {
            return Ok(members.map_or(Self::Absent, Self::Set));
        }
        Ok(slot.sorted()?.map_or(Self::Absent, Self::Sorted))
    }

    fn len(self) -> usize {
        match self {
            Self::Absent => 0,
            Self::Sorted(members) => members.len(),
            Self::Set(members) => members.len(),
        }
    }

    fn score(self, name: &Bytes) -> Option<Score> {
        match self {
            Self::Absent => None,
            Self::Sorted(members) => members.get(name).copied(),
            Self::Set(members) => members.contains(name).then_some(Score::ONE),
        }
    }

    fn each(self, mut visit: impl FnMut(&'a Bytes, Score)) {
        match self {
            Self::Absent => {}
            Self::Sorted(members) => {
                members.iter().for_each(|(name, score)| visit(name, *score));
            }
            Self::Set(members) => members.iter().for_each(|name| visit(name, Score::ONE)),
        }
    }
}

impl Aggregate {
    fn of(self, one: Score, other: Score) -> Score {
        match self {
            // As in Redis, the sum of both infinities is 0.
            Self::Sum => one.plus(other).unwrap_or(Score::ZERO),
            Self::Least => one.min(other),
            Self::Greatest => one.max(other),
        }
    }
}

impl Merge {
    /// The members, with their scores.
    pub(super) fn members(&self, slots: &[Slot]) -> Result<OrdMap<Bytes, Score>, Failure> {
        let mut sources = Vec::new();
        for (at, key) in self.keys.iter().enumerate() {
            sources.push((Source::of(slots, *key)?, self.weights.get(at).copied()));
        }
        if self.how != Combination::Difference {
            // Sums of scores depend on their order. This is the order of Redis.
            sources.sort_by_key(|(source, _)| source.len());
        }
        let weighted = |score: Score, weight: Option<Score>| match weight {
            Some(weight) => score.times(weight).unwrap_or(Score::ZERO),
            None => score,
        };
        let mut sources = sources.into_iter();
        let mut result: OrdMap<Bytes, Score> = OrdMap::new();
        if let Some((first, weight)) = sources.next() {
            first.each(|name, score| {
                result.insert(name.clone(), weighted(score, weight));
            });
        }
        for (source, weight) in sources {
            match self.how {
                Combination::Intersection => result.retain(|name, total| {
                    let found = source.score(name);
                    if let Some(score) = found {
                        *total = self.aggregate.of(*total, weighted(score, weight));
                    }
                    found.is_some()
                }),
                Combination::Union => source.each(|name, score| {
                    let score = weighted(score, weight);
                    result
                        .entry(name.clone())
                        .and_modify(|total| *total = self.aggregate.of(*total, score))
                        .or_insert(score);
                }),
                Combination::Difference => result.retain(|name, _| source.score(name).is_none()),
            }
        }
        Ok(result)
    }
}

/// The keys after their number.
fn parse_keys(args: &mut Args<'_>) -> Result<Vec<u32>, Failure> {
    let too_few =
        Failure::of(format!("ERR at least 1 input key is needed for '{}' command", args.name()));
    let many = args.integer().map_err(|_| NOT_INTEGER)?;
    let many = usize::try_from(many).ok().filter(|many| *many > 0).ok_or(too_few)?;
    if many > args.left() {
        return Err(SYNTAX);
    }
    args.some_keys(many)
}

/// `numkeys key [key …] [WEIGHTS weight [weight …]] [AGGREGATE SUM | MIN | MAX]`, and `WITHSCORES`
/// if the command answers members. Returns true if it has this word.
pub(super) fn parse(
    args: &mut Args<'_>,
    how: Combination,
    answers_members: bool,
) -> Result<(Merge, bool), Failure> {
    let keys = parse_keys(args)?;
    let mut merge = Merge { how, keys, weights: Vec::new(), aggregate: Aggregate::Sum };
    let (has_options, mut has_scores) = (how != Combination::Difference, false);
    while args.left() > 0 {
        if has_options && args.left() > merge.keys.len() && args.takes("WEIGHTS") {
            merge.weights.clear();
            for _ in &merge.keys {
                let weight = Score::parse(&args.bytes()?);
                merge.weights.push(weight.ok_or(NO_WEIGHT)?);
            }
        } else if has_options && args.left() > 1 && args.takes("AGGREGATE") {
            merge.aggregate = aggregate(args)?;
        } else if answers_members && args.takes("WITHSCORES") {
            has_scores = true;
        } else {
            return Err(SYNTAX);
        }
    }
    Ok((merge, has_scores))
}

const NO_WEIGHT: Failure = Failure::new("ERR weight value is not a float");

fn aggregate(args: &mut Args<'_>) -> Result<Aggregate, Failure> {
    if args.takes("SUM") {
        Ok(Aggregate::Sum)
    } else if args.takes("MIN") {
        Ok(Aggregate::Least)
    } else if args.takes("MAX") {
        Ok(Aggregate::Greatest)
    } else {
        Err(SYNTAX)
    }
}

/// `ZINTERCARD numkeys key [key …] [LIMIT limit]`
pub(super) fn parse_count(args: &mut Args<'_>) -> Result<(Merge, u64), Failure> {
    let keys = parse_keys(args)?;
    let limit = parse_limit(args)?;
    let (how, aggregate) = (Combination::Intersection, Aggregate::Sum);
    Ok((Merge { how, keys, weights: Vec::new(), aggregate }, limit))
}

/// `SINTERCARD numkeys key [key …] [LIMIT limit]`
pub(super) fn parse_set_count(args: &mut Args<'_>) -> Result<(Vec<u32>, u64), Failure> {
    let many = args.number_of_keys()?;
    if many > args.left() {
        return Err(Failure::new("ERR Number of keys can't be greater than number of args"));
    }
    Ok((args.some_keys(many)?, parse_limit(args)?))
}

/// The most members that a command counts; 0 for all.
fn parse_limit(args: &mut Args<'_>) -> Result<u64, Failure> {
    let mut limit = 0;
    while args.left() > 1 && args.takes("LIMIT") {
        limit = args.count().map_err(|_| Failure::new("ERR LIMIT can't be negative"))?;
    }
    args.end()?;
    Ok(limit)
}

/// This many, or fewer if there is a limit.
pub(super) fn limited(many: usize, limit: u64) -> usize {
    match usize::try_from(limit) {
        Ok(0) | Err(_) => many,
        Ok(limit) => many.min(limit),
    }
}
