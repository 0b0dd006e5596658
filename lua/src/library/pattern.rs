//! Patterns of the string library. Each step counts as work, because a pattern may try very many
//! ways to match.

use std::rc::Rc;

use super::{NEXT_MATCH, count, one};
use crate::heap::{Closure, Heap, Stop};
use crate::value::Value;
use crate::vm::{Args, Results, Vm};

/// Most captures of a pattern, as in Lua.
const CAPTURES_MAX: usize = 32;
/// How deeply the matcher calls itself.
const DEPTH_MAX: u32 = 200;
const STEP_WORK: u64 = 3;

/// Why a match cannot be tried.
enum Fault {
    Pattern(&'static str),
    Stop(Stop),
}

impl From<Stop> for Fault {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// The length of a capture.
#[derive(Clone, Copy)]
enum Length {
    Bytes(usize),
    /// The capture is still open: its closing parenthesis has not matched yet.
    Open,
    /// `()`: a capture of the position alone.
    Position,
}

struct Matcher<'a> {
    heap: &'a mut Heap,
    text: &'a [u8],
    pattern: &'a [u8],
    captures: Vec<(usize, Length)>,
    depth: u32,
}

type Matched = Result<Option<usize>, Fault>;

fn is_in_class(byte: u8, class: u8) -> bool {
    let is = match class.to_ascii_lowercase() {
        b'a' => byte.is_ascii_alphabetic(),
        b'c' => byte.is_ascii_control(),
        b'd' => byte.is_ascii_digit(),
        b'l' => byte.is_ascii_lowercase(),
        b'p' => byte.is_ascii_punctuation(),
        b's' => matches!(byte, b' ' | b'\t'..=b'\r'),
        b'u' => byte.is_ascii_uppercase(),
        b'w' => byte.is_ascii_alphanumeric(),
        b'x' => byte.is_ascii_hexdigit(),
        b'z' => byte == 0,
        _ => return class == byte,
    };
    is != class.is_ascii_uppercase()
}

impl Matcher<'_> {
    fn at(&self, position: usize) -> Option<u8> {
        self.pattern.get(position).copied()
    }

    /// The end of the single item at this position of the pattern.
    fn item_end(&self, start: usize) -> Result<usize, Fault> {
        match self.at(start) {
            Some(b'%') => match self.at(start + 1) {
                Some(_) => Ok(start + 2),
                None => Err(Fault::Pattern("malformed pattern (ends with '%')")),
            },
            Some(b'[') => {
                let mut at = start + 1;
                if self.at(at) == Some(b'^') {
                    at += 1;
                }
                loop {
                    let Some(byte) = self.at(at) else {
                        return Err(Fault::Pattern("malformed pattern (missing ']')"));
                    };
                    at += 1;
                    if byte == b'%' && self.at(at).is_some() {
                        at += 1;
                    }
                    if self.at(at) == Some(b']') {
                        return Ok(at + 1);
                    }
                }
            }
            Some(_) | None => Ok(start + 1),
        }
    }

    /// Whether a byte is in the set between these positions of the pattern.
    fn is_in_set(&self, byte: u8, start: usize, end: usize) -> bool {
        let mut at = start + 1;
        let is_inverted = self.at(at) == Some(b'^');
        if is_inverted {
            at += 1;
        }
        while at < end {
            let own = self.at(at).unwrap_or(0);
            let is = if own == b'%' {
                at += 1;
                is_in_class(byte, self.at(at).unwrap_or(0))
            } else if self.at(at + 1) == Some(b'-') && at + 2 < end {
                at += 2;
                (own..=self.at(at).unwrap_or(0)).contains(&byte)
            } else {
                own == byte
            };
            if is {
                return !is_inverted;
            }
            at += 1;
        }
        is_inverted
    }

    /// Whether the byte at `at` of the text matches the item of the pattern.
    fn is_match(&mut self, at: usize, item: usize, end: usize) -> Result<bool, Fault> {
        self.heap.charge(STEP_WORK + (end - item) as u64 / 4)?;
        let Some(byte) = self.text.get(at).copied() else { return Ok(false) };
        Ok(match self.at(item) {
            Some(b'.') => true,
            Some(b'%') => is_in_class(byte, self.at(item + 1).unwrap_or(0)),
            Some(b'[') => self.is_in_set(byte, item, end - 1),
            own => own == Some(byte),
        })
    }

    /// The end of the match of the pattern from `item` with the text from `at`.
    fn run(&mut self, at: usize, item: usize) -> Matched {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(Fault::Pattern("pattern too complex"));
        }
        let matched = self.run_from(at, item);
        self.depth -= 1;
        matched
    }

    fn run_from(&mut self, mut at: usize, mut item: usize) -> Matched {
        loop {
            self.heap.charge(STEP_WORK)?;
            let Some(byte) = self.at(item) else { return Ok(Some(at)) };
            match (byte, self.at(item + 1)) {
                (b'(', Some(b')')) => return self.begin(at, item + 2, Length::Position),
                (b'(', _) => return self.begin(at, item + 1, Length::Open),
                (b')', _) => return self.end(at, item + 1),
                (b'$', None) => return Ok((at == self.text.len()).then_some(at)),
                (b'%', Some(b'b')) => match self.balanced(at, item + 2)? {
                    None => return Ok(None),
                    Some(end) => (at, item) = (end, item + 4),
                },
                (b'%', Some(b'f')) => {
                    item += 2;
                    if self.at(item) != Some(b'[') {
                        return Err(Fault::Pattern("missing '[' after '%f' in pattern"));
                    }
                    let end = self.item_end(item)?;
                    self.heap.charge_length(end - item)?;
                    let before = at.checked_sub(1).and_then(|before| self.text.get(before));
                    let before = before.copied().unwrap_or(0);
                    let here = self.text.get(at).copied().unwrap_or(0);
                    let is_frontier = !self.is_in_set(before, item, end - 1)
                        && self.is_in_set(here, item, end - 1);
                    if !is_frontier {
                        return Ok(None);
                    }
                    item = end;
                }
                (b'%', Some(digit @ b'0'..=b'9')) => match self.again(at, digit)? {
                    None => return Ok(None),
                    Some(end) => (at, item) = (end, item + 2),
                },
                _ => {
                    let end = self.item_end(item)?;
                    self.heap.charge_length((end - item) / 2)?;
                    match self.at(end) {
                        Some(b'?') => {
                            if self.is_match(at, item, end)?
                                && let Some(found) = self.run(at + 1, end + 1)?
                            {
                                return Ok(Some(found));
                            }
                            item = end + 1;
                        }
                        Some(b'*') => return self.most(at, item, end),
                        Some(b'+') => {
                            if !self.is_match(at, item, end)? {
                                return Ok(None);
                            }
                            return self.most(at + 1, item, end);
                        }
                        Some(b'-') => return self.least(at, item, end),
                        Some(_) | None => {
                            if !self.is_match(at, item, end)? {
                                return Ok(None);
                            }
                            (at, item) = (at + 1, end);
                        }
                    }
                }
            }
        }
    }

    /// As many of an item as possible.
    fn most(&mut self, at: usize, item: usize, end: usize) -> Matched {
        let mut many = 0;
        while self.is_match(at + many, item, end)? {
            many += 1;
        }
        loop {
            if let Some(found) = self.run(at + many, end + 1)? {
                return Ok(Some(found));
            }
            match many.checked_sub(1) {
                Some(fewer) => many = fewer,
                None => return Ok(None),
            }
        }
    }

    /// As few of an item as possible.
    fn least(&mut self, mut at: usize, item: usize, end: usize) -> Matched {
        loop {
            if let Some(found) = self.run(at, end + 1)? {
                return Ok(Some(found));
            }
            if !self.is_match(at, item, end)? {
                return Ok(None);
            }
            at += 1;
        }
    }

    fn begin(&mut self, at: usize, item: usize, length: Length) -> Matched {
        if self.captures.len() >= CAPTURES_MAX {
            return Err(Fault::Pattern("too many captures"));
        }
        let before = self.captures.len();
        self.captures.push((at, length));
        let found = self.run(at, item)?;
        if found.is_none() {
            self.captures.truncate(before);
        }
        Ok(found)
    }

    fn end(&mut self, at: usize, item: usize) -> Matched {
        let open = self.captures.iter().rposition(|(_, own)| matches!(own, Length::Open));
        let Some(open) = open else { return Err(Fault::Pattern("invalid pattern capture")) };
        if let Some((start, length)) = self.captures.get_mut(open) {
            *length = Length::Bytes(at.saturating_sub(*start));
        }
        let found = self.run(at, item)?;
        if found.is_none()
            && let Some((_, length)) = self.captures.get_mut(open)
        {
            *length = Length::Open;
        }
        Ok(found)
    }

    /// What is between two bytes that open and close, with as many of both.
    fn balanced(&mut self, at: usize, item: usize) -> Matched {
        let (Some(open), Some(close)) = (self.at(item), self.at(item + 1)) else {
            return Err(Fault::Pattern("unbalanced pattern"));
        };
        if self.text.get(at) != Some(&open) {
            return Ok(None);
        }
        let mut depth = 1_usize;
        for (offset, byte) in self.text.iter().enumerate().skip(at + 1) {
            self.heap.charge(1)?;
            if *byte == close {
                depth -= 1;
                if depth == 0 {
                    return Ok(Some(offset + 1));
                }
            } else if *byte == open {
                depth += 1;
            }
        }
        Ok(None)
    }

    /// The text of an earlier capture once more.
    fn again(&mut self, at: usize, digit: u8) -> Matched {
        let number = usize::from(digit).checked_sub(usize::from(b'1'));
        let capture = number.and_then(|number| self.captures.get(number).copied());
        let Some((start, Length::Bytes(length))) = capture else {
            return Err(Fault::Pattern("invalid capture index"));
        };
        self.heap.charge_length(length)?;
        let wanted = self.text.get(start..start + length).unwrap_or_default();
        let rest = self.text.get(at..).unwrap_or_default();
        Ok(rest.starts_with(wanted).then_some(at + length))
    }
}

/// A match: where it is, and its captures.
struct Match {
    start: usize,
    end: usize,
    captures: Vec<(usize, Length)>,
}

/// The match of a pattern that begins at `start` of a text.
fn match_at(
    vm: &mut Vm<'_>,
    text: &[u8],
    pattern: &[u8],
    start: usize,
) -> Result<Option<Match>, Stop> {
    let captures = Vec::new();
    let mut matcher = Matcher { heap: &mut vm.heap, text, pattern, captures, depth: 0 };
    match matcher.run(start, 0) {
        Ok(None) => Ok(None),
        Ok(Some(end)) => Ok(Some(Match { start, end, captures: matcher.captures })),
        Err(Fault::Stop(stop)) => Err(stop),
        Err(Fault::Pattern(what)) => Err(vm.error(what)),
    }
}

impl Match {
    fn capture(&self, vm: &mut Vm<'_>, text: &[u8], number: usize) -> Result<Value, Stop> {
        let part = |start: usize, end: usize| text.get(start..end).unwrap_or_default();
        match self.captures.get(number) {
            None if number == 0 => vm.heap.text(part(self.start, self.end)),
            None => Err(vm.error("invalid capture index")),
            Some((start, Length::Bytes(length))) => vm.heap.text(part(*start, start + length)),
            Some((start, Length::Position)) => Ok(count(start + 1)),
            Some((_, Length::Open)) => Err(vm.error("unfinished capture")),
        }
    }

    /// All captures; the whole match if there are none and it is wanted.
    fn all(&self, vm: &mut Vm<'_>, text: &[u8], wants_whole: bool) -> Result<Vec<Value>, Stop> {
        let many = self.captures.len().max(usize::from(wants_whole));
        (0..many).map(|number| self.capture(vm, text, number)).collect()
    }
}

/// Where `wanted` is in a text, from `from` on.
fn find_plain(
    vm: &mut Vm<'_>,
    text: &[u8],
    wanted: &[u8],
    from: usize,
) -> Result<Option<usize>, Stop> {
    let rest = text.get(from..).unwrap_or_default();
    let Some((first, others)) = wanted.split_first() else { return Ok(Some(from)) };
    let mut at = 0;
    while let Some(next) = rest.get(at..).unwrap_or_default().iter().position(|byte| byte == first)
    {
        vm.heap.charge_length(next / 8 + others.len() / 8 + 1)?;
        at += next + 1;
        if rest.get(at..).unwrap_or_default().starts_with(others) {
            return Ok(Some(from + at - 1));
        }
    }
    vm.heap.charge_length(rest.len() / 8)?;
    Ok(None)
}

/// `string.find`, or `string.match`.
pub(super) fn find(vm: &mut Vm<'_>, args: Args, is_find: bool) -> Result<Results, Stop> {
    let (text, pattern) = (vm.string_arg(args, 0)?, vm.string_arg(args, 1)?);
    vm.heap.charge_length(pattern.len())?;
    let from = super::string::start(vm.integer_or(args, 2, 1)?, text.len());
    let is_plain =
        vm.arg(args, 3).is_true() || !pattern.iter().any(|byte| b"^$*+?.([%-".contains(byte));
    if is_find && is_plain {
        let found = find_plain(vm, &text, &pattern, from)?;
        return Ok(match found {
            Some(at) => Results::Many(vec![count(at + 1), count(at + pattern.len())]),
            None => Results::One(Value::Nil),
        });
    }
    let anchored = pattern.strip_prefix(b"^");
    let items = anchored.unwrap_or(&pattern);
    for start in from..=text.len() {
        if let Some(found) = match_at(vm, &text, items, start)? {
            let mut values = found.all(vm, &text, !is_find)?;
            if is_find {
                values.splice(0..0, [count(start + 1), count(found.end)]);
            }
            return Ok(Results::Many(values));
        }
        if anchored.is_some() {
            break;
        }
    }
    one(Value::Nil)
}

pub(super) fn gmatch(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let (text, pattern) = (vm.string_arg(args, 0)?, vm.string_arg(args, 1)?);
    let state = [vm.heap.text(&text)?, vm.heap.text(&pattern)?, Value::Number(0.0)];
    one(vm.heap.new_closure(Closure::Native { function: NEXT_MATCH, state })?)
}

/// The next match, for `gmatch`.
pub(super) fn next_match(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let Value::Closure(own) = args.callee else { return one(Value::Nil) };
    let Some(Closure::Native { state, .. }) = vm.heap.closure(own) else { return one(Value::Nil) };
    let [Value::String(text), Value::String(pattern), Value::Number(from)] = *state else {
        return one(Value::Nil);
    };
    let (text, pattern) = (vm.heap.bytes(text), vm.heap.bytes(pattern));
    vm.heap.charge_length(pattern.len())?;
    let from = usize::try_from(crate::number::whole(from)).unwrap_or(usize::MAX);
    for start in from..=text.len() {
        if let Some(found) = match_at(vm, &text, &pattern, start)? {
            let next = if found.end == start { start + 1 } else { found.end };
            if let Some(Closure::Native { state, .. }) = vm.heap.closure_mut(own) {
                state[2] = count(next);
            }
            return Ok(Results::Many(found.all(vm, &text, true)?));
        }
    }
    if let Some(Closure::Native { state, .. }) = vm.heap.closure_mut(own) {
        state[2] = count(text.len() + 1);
    }
    one(Value::Nil)
}

pub(super) fn gsub(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let (text, pattern) = (vm.string_arg(args, 0)?, vm.string_arg(args, 1)?);
    vm.heap.charge_length(pattern.len())?;
    let with = vm.arg(args, 2);
    let template = match with {
        Value::String(_) | Value::Number(_) => Some(vm.string_arg(args, 2)?),
        _ if with.is_function() || with.as_table().is_some() => None,
        _ => return Err(vm.bad_arg(args, 2, "string/function/table expected")),
    };
    let most = vm.integer_or(args, 3, i64::MAX)?;
    let anchored = pattern.strip_prefix(b"^");
    let items = anchored.unwrap_or(&pattern);
    let (mut whole, mut start, mut many) = (Vec::new(), 0, 0_u32);
    while i64::from(many) < most {
        let found = match_at(vm, &text, items, start)?;
        let mut end = start;
        if let Some(found) = found {
            many += 1;
            let new = replacement(vm, &text, &found, with, template.as_ref())?;
            vm.heap.charge_length(new.len())?;
            whole.extend_from_slice(&new);
            end = found.end;
        }
        if end > start {
            start = end;
        } else if let Some(byte) = text.get(start) {
            whole.push(*byte);
            start += 1;
        } else {
            break;
        }
        if anchored.is_some() {
            break;
        }
    }
    whole.extend_from_slice(text.get(start..).unwrap_or_default());
    let whole = vm.heap.text(&whole)?;
    Ok(Results::Many(vec![whole, Value::Number(f64::from(many))]))
}

/// What replaces a match.
fn replacement(
    vm: &mut Vm<'_>,
    text: &[u8],
    found: &Match,
    with: Value,
    template: Option<&Rc<[u8]>>,
) -> Result<Vec<u8>, Stop> {
    let whole = text.get(found.start..found.end).unwrap_or_default();
    if let Some(template) = template {
        return filled(vm, text, found, template);
    }
    let value = if with.is_function() {
        let captures = found.all(vm, text, true)?;
        vm.call(with, &captures)?.first().copied().unwrap_or_default()
    } else {
        let key = found.capture(vm, text, 0)?;
        vm.index(with, key, None)?
    };
    if !value.is_true() {
        return Ok(whole.to_vec());
    }
    match vm.text_of(value)? {
        Some(text) => Ok(vm.heap.bytes(text).to_vec()),
        None => {
            let kind = value.type_name();
            Err(vm.error(&format!("invalid replacement value (a {kind})")))
        }
    }
}

/// A template with its `%1` and so on replaced.
fn filled(vm: &mut Vm<'_>, text: &[u8], found: &Match, template: &[u8]) -> Result<Vec<u8>, Stop> {
    vm.heap.charge_length(template.len())?;
    let mut new = Vec::new();
    let mut bytes = template.iter();
    while let Some(byte) = bytes.next() {
        if *byte != b'%' {
            new.push(*byte);
            continue;
        }
        match bytes.next() {
            Some(b'0') => {
                let whole = text.get(found.start..found.end).unwrap_or_default();
                vm.heap.charge_length(whole.len())?;
                new.extend_from_slice(whole);
            }
            Some(digit @ b'1'..=b'9') => {
                let value = found.capture(vm, text, usize::from(digit - b'1'))?;
                if let Some(part) = vm.text_of(value)? {
                    let part = vm.heap.bytes(part);
                    vm.heap.charge_length(part.len())?;
                    new.extend_from_slice(&part);
                }
            }
            Some(other) => new.push(*other),
            None => {}
        }
    }
    Ok(new)
}
