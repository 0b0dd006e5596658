//! Commands on sorted sets.

use bytes::Bytes;

use super::entry::cost_of;
use super::number::Score;
use super::parse::Args;
use super::reply::{Answer, Failure, NOT_FLOAT, Reply, SYNTAX};
use super::state::{Context, Slot};
use super::{Command, Use, keys, random};
use crate::ordered::OrdMap;
use crate::wire::Wire;

/// An end of an interval of scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Bound {
    /// The score.
    pub score: Score,
    /// True if the score itself is outside.
    pub is_exclusive: bool,
}

/// An interval of scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Interval {
    /// The lower end.
    pub min: Bound,
    /// The upper end.
    pub max: Bound,
}

impl Interval {
    fn contains(&self, score: Score) -> bool {
        let is_above =
            score > self.min.score || (score == self.min.score && !self.min.is_exclusive);
        let is_below =
            score < self.max.score || (score == self.max.score && !self.max.is_exclusive);
        is_above && is_below
    }
}

/// An end of an interval of names.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum NameBound {
    /// Before all names.
    Lowest,
    /// After all names.
    Highest,
    /// This name, which is inside.
    Inclusive(Bytes),
    /// This name, which is outside.
    Exclusive(Bytes),
}

impl NameBound {
    /// Whether a name is above this lower end.
    fn is_below(&self, name: &Bytes) -> bool {
        match self {
            Self::Lowest => true,
            Self::Highest => false,
            Self::Inclusive(end) => name >= end,
            Self::Exclusive(end) => name > end,
        }
    }

    /// Whether a name is below this upper end.
    fn is_above(&self, name: &Bytes) -> bool {
        match self {
            Self::Lowest => false,
            Self::Highest => true,
            Self::Inclusive(end) => name <= end,
            Self::Exclusive(end) => name < end,
        }
    }
}

/// An interval of names.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct NameInterval {
    /// The lower end.
    pub min: NameBound,
    /// The upper end.
    pub max: NameBound,
}

impl NameInterval {
    fn contains(&self, name: &Bytes) -> bool {
        self.min.is_below(name) && self.max.is_above(name)
    }
}

/// Which members a range has.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Span {
    /// From one rank to another, both included.
    Ranks(i64, i64),
    /// All in an interval of scores.
    Scores(Interval),
    /// All in an interval of names.
    Names(NameInterval),
}

/// When `ZADD` changes members.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Wire)]
pub struct AddOptions {
    /// `NX`: only new members.
    pub only_new: bool,
    /// `XX`: only members that exist.
    pub only_existing: bool,
    /// `GT`: existing members only if the score grows.
    pub only_greater: bool,
    /// `LT`: existing members only if the score shrinks.
    pub only_less: bool,
    /// `CH`: the answer counts changed members, too.
    pub counts_changed: bool,
}

/// A command on one sorted set.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Sorted {
    /// `ZSCORE`
    Score(Bytes),
    /// `ZMSCORE`
    ScoreSeveral(Vec<Bytes>),
    /// `ZCARD`
    Count,
    /// `ZCOUNT`
    CountIn(Interval),
    /// `ZRANK`, and `ZREVRANK` if true.
    Rank(Bytes, bool),
    /// `ZRANGE` and its relatives.
    Range {
        /// Which members.
        span: Span,
        /// From the highest score to the lowest.
        is_reverse: bool,
        /// Members to leave out first, and most members to return (all if negative).
        limit: Option<(i64, i64)>,
        /// With their scores.
        has_scores: bool,
    },
    /// `ZADD`
    Add(AddOptions, Vec<(Bytes, Score)>),
    /// `ZINCRBY`, and `ZADD` with `INCR`
    Increment(AddOptions, Bytes, Score),
    /// `ZREM`
    Remove(Vec<Bytes>),
    /// `ZREMRANGEBYRANK`, `ZREMRANGEBYSCORE`, `ZREMRANGEBYLEX`
    RemoveRange(Span),
    /// `ZPOPMIN`, and `ZPOPMAX` if true: how many, if the command says so.
    Pop(bool, Option<u64>),
    /// `ZLEXCOUNT`
    CountNames(NameInterval),
    /// `ZRANDMEMBER`: how many, and whether with their scores.
    Random(Option<i64>, bool),
}

const SUM_IS_NAN: Failure = Failure::new("ERR resulting score is not a number (NaN)");

impl Sorted {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Score(_)
            | Self::ScoreSeveral(_)
            | Self::Count
            | Self::CountIn(_)
            | Self::Rank(..)
            | Self::Range { .. }
            | Self::CountNames(_)
            | Self::Random(..) => Use::Read,
            Self::Add(..)
            | Self::Increment(..)
            | Self::Remove(_)
            | Self::RemoveRange(_)
            | Self::Pop(..) => Use::Change,
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        let members = slot.sorted()?;
        let score = |name: &Bytes| {
            let score = members.and_then(|members| members.get(name));
            score.map_or(Reply::Nil, |score| Reply::Double(*score))
        };
        match self {
            Self::Score(name) => Ok(score(name)),
            Self::ScoreSeveral(names) => Ok(Reply::Array(names.iter().map(score).collect())),
            Self::Count => Ok(Reply::count(members.map_or(0, OrdMap::len))),
            Self::CountIn(interval) => {
                let scores = members.into_iter().flatten().map(|(_, score)| *score);
                Ok(Reply::count(scores.filter(|score| interval.contains(*score)).count()))
            }
            Self::Rank(name, is_reverse) => {
                let Some(own) = members.and_then(|members| members.get(name)) else {
                    return Ok(Reply::Nil);
                };
                let all = members.into_iter().flatten();
                let own = (*own, name);
                let before = |(name, score): (&Bytes, &Score)| {
                    if *is_reverse { (*score, name) > own } else { (*score, name) < own }
                };
                Ok(Reply::count(all.filter(|member| before(*member)).count()))
            }
            Self::Range { span, is_reverse, limit, has_scores } => {
                let chosen = select(slot, span, *is_reverse, *limit)?;
                Ok(listed(chosen, *has_scores))
            }
            Self::Add(options, new) => add(slot, cx, *options, new),
            Self::Increment(options, name, amount) => increment(slot, cx, *options, name, *amount),
            Self::Remove(names) => remove(slot, cx, names).map(Reply::count),
            Self::RemoveRange(span) => {
                let chosen = select(slot, span, false, None)?;
                let names: Vec<Bytes> = chosen.into_iter().map(|(_, name)| name).collect();
                remove(slot, cx, &names).map(Reply::count)
            }
            Self::Pop(is_max, count) => {
                let chosen = pop(slot, cx, *is_max, count.unwrap_or(1))?;
                Ok(match count {
                    Some(_) => listed(chosen, true),
                    None => flat(chosen),
                })
            }
            Self::CountNames(interval) => {
                let names = members.into_iter().flatten().map(|(name, _)| name);
                Ok(Reply::count(names.filter(|name| interval.contains(name)).count()))
            }
            Self::Random(None, _) => {
                let one = members.and_then(|members| random::one(cx.stamp, members.keys()));
                Ok(Reply::bulk_or_nil(one))
            }
            Self::Random(Some(count), has_scores) => {
                let all = members.into_iter().flatten();
                let all = all.map(|(name, score)| (*score, name.clone())).collect();
                Ok(listed(random::choose(cx.stamp, *count, all), *has_scores))
            }
        }
    }
}

/// Removes members with the lowest or highest scores.
pub(super) fn pop(
    slot: &mut Slot,
    cx: Context,
    is_max: bool,
    many: u64,
) -> Result<Vec<(Score, Bytes)>, Failure> {
    let many = i64::try_from(many).unwrap_or(i64::MAX);
    let chosen = select(slot, &Span::Ranks(0, -1), is_max, Some((0, many)))?;
    let names: Vec<Bytes> = chosen.iter().map(|(_, name)| name.clone()).collect();
    remove(slot, cx, &names)?;
    Ok(chosen)
}

/// The members of a range, with their scores, in the order of the answer.
pub(super) fn select(
    slot: &Slot,
    span: &Span,
    is_reverse: bool,
    limit: Option<(i64, i64)>,
) -> Result<Vec<(Score, Bytes)>, Failure> {
    let order = slot.order()?;
    let (skip, many) = limit.map_or((0, usize::MAX), |(skip, many)| {
        (usize::try_from(skip).unwrap_or(usize::MAX), usize::try_from(many).unwrap_or(usize::MAX))
    });
    let all: Box<dyn Iterator<Item = &(Score, Bytes)>> =
        if is_reverse { Box::new(order.iter().rev()) } else { Box::new(order.iter()) };
    let chosen: Vec<(Score, Bytes)> = match span {
        Span::Ranks(first, last) => {
            let part = keys::span(*first, *last, order.len());
            let part = all.skip(part.start).take(part.len());
            part.skip(skip).take(many).cloned().collect()
        }
        Span::Scores(interval) => {
            let part = all.filter(|(score, _)| interval.contains(*score));
            part.skip(skip).take(many).cloned().collect()
        }
        Span::Names(interval) => {
            let part = all.filter(|(_, name)| interval.contains(name));
            part.skip(skip).take(many).cloned().collect()
        }
    };
    Ok(chosen)
}

/// Members, each with its score if asked for. With scores the answer is a list of pairs, which
/// RESP2 writes one after the other.
pub(super) fn listed(members: Vec<(Score, Bytes)>, has_scores: bool) -> Reply {
    if has_scores {
        Reply::Pairs(members.into_iter().map(|(score, name)| (name, score)).collect())
    } else {
        Reply::Array(members.into_iter().map(|(_, name)| Reply::Bulk(name)).collect())
    }
}

/// A member and its score in one list.
fn flat(members: Vec<(Score, Bytes)>) -> Reply {
    let both = |(score, name)| [Reply::Bulk(name), Reply::Double(score)];
    Reply::Array(members.into_iter().flat_map(both).collect())
}

/// Whether `ZADD` sets a score.
fn sets(options: AddOptions, old: Option<Score>, new: Score) -> bool {
    match old {
        None => !options.only_existing,
        Some(old) => {
            !options.only_new
                && (!options.only_greater || new > old)
                && (!options.only_less || new < old)
        }
    }
}

fn add(slot: &mut Slot, cx: Context, options: AddOptions, new: &[(Bytes, Score)]) -> Answer {
    slot.check_room(cost_of(new.iter().map(|(name, _)| name)))?;
    if slot.sorted()?.is_none() && options.only_existing {
        return Ok(Reply::Integer(0));
    }
    let (members, cost) = slot.sorted_mut()?;
    let (mut added, mut changed) = (0, 0);
    for (name, score) in new {
        let old = members.get(name).copied();
        if !sets(options, old, *score) {
            continue;
        }
        members.insert(name.clone(), *score);
        match old {
            None => {
                *cost += cost_of([name]);
                added += 1;
            }
            Some(old) => changed += usize::from(old != *score),
        }
    }
    if added + changed > 0 {
        slot.changed(cx);
    }
    Ok(Reply::count(if options.counts_changed { added + changed } else { added }))
}

fn increment(
    slot: &mut Slot,
    cx: Context,
    options: AddOptions,
    name: &Bytes,
    amount: Score,
) -> Answer {
    let old = slot.sorted()?.and_then(|members| members.get(name)).copied();
    let new = match old {
        Some(old) => old.plus(amount).ok_or(SUM_IS_NAN)?,
        None => amount,
    };
    if !sets(options, old, new) {
        return Ok(Reply::Nil);
    }
    slot.check_room(cost_of([name]))?;
    let (members, cost) = slot.sorted_mut()?;
    if members.insert(name.clone(), new).is_none() {
        *cost += cost_of([name]);
    }
    slot.changed(cx);
    Ok(Reply::Double(new))
}

fn remove(slot: &mut Slot, cx: Context, names: &[Bytes]) -> Result<usize, Failure> {
    if slot.sorted()?.is_none() {
        return Ok(0);
    }
    let (members, cost) = slot.sorted_mut()?;
    let mut gone = 0;
    for name in names {
        if members.remove(name).is_some() {
            *cost = cost.saturating_sub(cost_of([name]));
            gone += 1;
        }
    }
    if gone > 0 {
        slot.changed(cx);
    }
    Ok(gone)
}

/// `ZADD key [NX | XX] [GT | LT] [CH] [INCR] score member [score member ...]`
pub(super) fn parse_add(args: &mut Args<'_>) -> Result<(u32, Sorted), Failure> {
    let key = args.key()?;
    let (mut options, mut increments) = (AddOptions::default(), false);
    loop {
        let flag = if args.takes("NX") {
            &mut options.only_new
        } else if args.takes("XX") {
            &mut options.only_existing
        } else if args.takes("GT") {
            &mut options.only_greater
        } else if args.takes("LT") {
            &mut options.only_less
        } else if args.takes("CH") {
            &mut options.counts_changed
        } else if args.takes("INCR") {
            &mut increments
        } else {
            break;
        };
        *flag = true;
    }
    if options.only_new && options.only_existing {
        return Err(Failure::new("ERR XX and NX options at the same time are not compatible"));
    }
    let AddOptions { only_new, only_greater, only_less, .. } = options;
    if [only_new, only_greater, only_less].into_iter().filter(|flag| *flag).count() > 1 {
        return Err(Failure::new(
            "ERR GT, LT, and/or NX options at the same time are not compatible",
        ));
    }
    if args.left() == 0 || !args.left().is_multiple_of(2) {
        return Err(SYNTAX);
    }
    let mut new = Vec::new();
    while args.left() > 0 {
        let score = args.score()?;
        new.push((args.bytes()?, score));
    }
    if !increments {
        return Ok((key, Sorted::Add(options, new)));
    }
    match <[_; 1]>::try_from(new) {
        Ok([(name, score)]) => Ok((key, Sorted::Increment(options, name, score))),
        Err(_) => Err(Failure::new("ERR INCR option supports a single increment-element pair")),
    }
}

fn bound(text: &Bytes) -> Result<Bound, Failure> {
    let (digits, is_exclusive) = match text.strip_prefix(b"(") {
        Some(rest) => (rest, true),
        None => (text.as_ref(), false),
    };
    let score = Score::parse(digits).ok_or(Failure::new("ERR min or max is not a float"))?;
    Ok(Bound { score, is_exclusive })
}

/// Two bounds; the higher one first if the range is reversed.
pub(super) fn parse_interval(args: &mut Args<'_>, is_reverse: bool) -> Result<Interval, Failure> {
    let (first, second) = (bound(&args.bytes()?)?, bound(&args.bytes()?)?);
    let (min, max) = if is_reverse { (second, first) } else { (first, second) };
    Ok(Interval { min, max })
}

const BAD_NAME_BOUND: Failure = Failure::new("ERR min or max not valid string range item");

fn name_bound(text: &Bytes) -> Result<NameBound, Failure> {
    match text.split_first() {
        Some((b'-', [])) => Ok(NameBound::Lowest),
        Some((b'+', [])) => Ok(NameBound::Highest),
        Some((b'[', _)) => Ok(NameBound::Inclusive(text.slice(1..))),
        Some((b'(', _)) => Ok(NameBound::Exclusive(text.slice(1..))),
        Some(_) | None => Err(BAD_NAME_BOUND),
    }
}

/// Two names as bounds; the higher one first if the range is reversed.
fn name_interval(first: &Bytes, second: &Bytes, is_reverse: bool) -> Result<NameInterval, Failure> {
    let (first, second) = (name_bound(first)?, name_bound(second)?);
    let (min, max) = if is_reverse { (second, first) } else { (first, second) };
    Ok(NameInterval { min, max })
}

/// Two names as bounds, the lower one first.
pub(super) fn parse_names(args: &mut Args<'_>) -> Result<NameInterval, Failure> {
    name_interval(&args.bytes()?, &args.bytes()?, false)
}

/// What the bounds of a range are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Ranks,
    Scores,
    Names,
}

/// What the words after the bounds of a range say.
struct RangeOptions {
    kind: Kind,
    is_reverse: bool,
    limit: Option<(i64, i64)>,
    has_scores: bool,
}

impl RangeOptions {
    /// `[BYSCORE | BYLEX] [REV] [LIMIT offset count]`, and `WITHSCORES` if the command answers
    /// members.
    fn parse(args: &mut Args<'_>, answers_members: bool) -> Result<Self, Failure> {
        let (mut kind, mut is_reverse) = (Kind::Ranks, false);
        let (mut limit, mut has_scores) = (None, false);
        while args.left() > 0 {
            if kind == Kind::Ranks && args.takes("BYSCORE") {
                kind = Kind::Scores;
            } else if kind == Kind::Ranks && args.takes("BYLEX") {
                kind = Kind::Names;
            } else if args.takes("REV") {
                is_reverse = true;
            } else if args.takes("LIMIT") {
                limit = Some((args.integer()?, args.integer()?));
            } else if answers_members && args.takes("WITHSCORES") {
                has_scores = true;
            } else {
                return Err(SYNTAX);
            }
        }
        if kind == Kind::Ranks && limit.take().is_some_and(|(_, many)| many != -1) {
            return Err(NO_LIMIT);
        }
        if has_scores && kind == Kind::Names {
            return Err(NO_SCORES);
        }
        Ok(Self { kind, is_reverse, limit, has_scores })
    }

    fn span(&self, first: &Bytes, second: &Bytes) -> Result<Span, Failure> {
        match self.kind {
            Kind::Ranks => {
                let rank =
                    |text: &Bytes| super::number::integer(text).ok_or(super::reply::NOT_INTEGER);
                Ok(Span::Ranks(rank(first)?, rank(second)?))
            }
            Kind::Scores => {
                let (first, second) = (bound(first)?, bound(second)?);
                let (min, max) = if self.is_reverse { (second, first) } else { (first, second) };
                Ok(Span::Scores(Interval { min, max }))
            }
            Kind::Names => name_interval(first, second, self.is_reverse).map(Span::Names),
        }
    }
}

const NO_LIMIT: Failure = Failure::new(
    "ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX",
);
const NO_SCORES: Failure =
    Failure::new("ERR syntax error, WITHSCORES not supported in combination with BYLEX");

/// `ZRANGE key start stop [BYSCORE | BYLEX] [REV] [LIMIT offset count] [WITHSCORES]`
pub(super) fn parse_range(args: &mut Args<'_>) -> Result<(u32, Sorted), Failure> {
    let key = args.key()?;
    let (first, second) = (args.bytes()?, args.bytes()?);
    let options = RangeOptions::parse(args, true)?;
    let span = options.span(&first, &second)?;
    let RangeOptions { is_reverse, limit, has_scores, .. } = options;
    Ok((key, Sorted::Range { span, is_reverse, limit, has_scores }))
}

/// `ZRANGESTORE target key start stop [BYSCORE | BYLEX] [REV] [LIMIT offset count]`
pub(super) fn parse_range_into(args: &mut Args<'_>) -> Result<Command, Failure> {
    let (target, source) = (args.key()?, args.key()?);
    let (first, second) = (args.bytes()?, args.bytes()?);
    let options = RangeOptions::parse(args, false)?;
    let span = options.span(&first, &second)?;
    let RangeOptions { is_reverse, limit, .. } = options;
    Ok(Command::RangeInto { target, source, span, is_reverse, limit })
}

/// `ZRANGEBYLEX key min max [LIMIT offset count]`, or its reverse.
pub(super) fn parse_range_by_name(
    args: &mut Args<'_>,
    is_reverse: bool,
) -> Result<(u32, Sorted), Failure> {
    let key = args.key()?;
    let (first, second) = (args.bytes()?, args.bytes()?);
    let (mut limit, mut has_scores) = (None, false);
    while args.left() > 0 {
        if args.takes("WITHSCORES") {
            has_scores = true;
        } else if args.left() > 2 && args.takes("LIMIT") {
            limit = Some((args.integer()?, args.integer()?));
        } else {
            return Err(SYNTAX);
        }
    }
    if has_scores {
        return Err(NO_SCORES);
    }
    let span = Span::Names(name_interval(&first, &second, is_reverse)?);
    Ok((key, Sorted::Range { span, is_reverse, limit, has_scores }))
}

/// `ZREVRANGE key start stop [WITHSCORES]`
pub(super) fn parse_reverse_range(args: &mut Args<'_>) -> Result<(u32, Sorted), Failure> {
    let key = args.key()?;
    let span = Span::Ranks(args.integer()?, args.integer()?);
    let has_scores = args.takes("WITHSCORES");
    Ok((key, Sorted::Range { span, is_reverse: true, limit: None, has_scores }))
}

/// `ZRANGEBYSCORE key min max [WITHSCORES] [LIMIT offset count]`, or its reverse.
pub(super) fn parse_range_by_score(
    args: &mut Args<'_>,
    is_reverse: bool,
) -> Result<(u32, Sorted), Failure> {
    let key = args.key()?;
    let span = Span::Scores(parse_interval(args, is_reverse)?);
    let (mut limit, mut has_scores) = (None, false);
    while args.left() > 0 {
        if args.takes("WITHSCORES") {
            has_scores = true;
        } else if args.takes("LIMIT") {
            limit = Some((args.integer()?, args.integer()?));
        } else {
            return Err(SYNTAX);
        }
    }
    Ok((key, Sorted::Range { span, is_reverse, limit, has_scores }))
}

/// `ZINCRBY key increment member`
pub(super) fn parse_increment(args: &mut Args<'_>) -> Result<(u32, Sorted), Failure> {
    let key = args.key()?;
    let amount = Score::parse(&args.bytes()?).ok_or(NOT_FLOAT)?;
    Ok((key, Sorted::Increment(AddOptions::default(), args.bytes()?, amount)))
}
