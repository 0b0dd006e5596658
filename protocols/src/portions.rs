//! Splits lists that may be larger than one message over several messages.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Time;
use orthodrome_core::{Rng, Wire, WireError};

/// The part of a list that a message contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
#[wire(check = "Portion::check", sample = "Portion::draw")]
pub struct Portion {
    /// When its sender sent the list. Parts of lists that were sent at different moments are never
    /// combined.
    pub sent_at: Time,
    /// The number of the part, from 0.
    pub number: u32,
    /// The number of parts.
    pub of: u32,
}

impl Portion {
    /// The whole list.
    pub const WHOLE: Self = Self { sent_at: Time::ZERO, number: 0, of: 1 };

    fn check(&self) -> Result<(), WireError> {
        let Self { number, of, .. } = *self;
        if number < of {
            return Ok(());
        }
        let found = format!("part {number} of {of}");
        Err(WireError::Value { field: "Portion", found, wanted: "one of the parts" })
    }

    /// A random portion, for tests of its encoding.
    fn draw(rng: &mut Rng) -> Self {
        let of = 1 + u32::from(u8::sample(rng));
        let number = u32::sample(rng) % of;
        Self { sent_at: Time::sample(rng), number, of }
    }

    /// Numbers the parts of a list that is sent at `now`.
    pub(crate) fn number<T>(parts: Vec<T>, now: Time) -> impl Iterator<Item = (Self, T)> {
        let of = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        let sent_at = if of == 1 { Time::ZERO } else { now };
        (0..).zip(parts).map(move |(number, part)| (Self { sent_at, number, of }, part))
    }
}

/// The parts of a list that have arrived so far.
#[derive(Debug)]
pub struct Assembly<T> {
    sent_at: Time,
    parts: OrdMap<u32, T>,
}

impl<T> Default for Assembly<T> {
    fn default() -> Self {
        Self { sent_at: Time::ZERO, parts: OrdMap::new() }
    }
}

impl<T> Assembly<T> {
    /// A part arrived. Returns the whole list, in order, if no part is missing any more. A newer
    /// list replaces an incomplete older one: a sender that repeats a list sends all of it.
    pub(crate) fn add(&mut self, portion: Portion, part: T) -> Option<Vec<T>> {
        if self.sent_at != portion.sent_at {
            self.sent_at = portion.sent_at;
            self.parts.clear();
        }
        self.parts.insert(portion.number, part);
        let is_whole = self.parts.len() >= usize::try_from(portion.of).unwrap_or(usize::MAX);
        is_whole.then(|| std::mem::take(&mut self.parts).into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_moment_are_put_together_in_any_order() {
        let mut sent: Vec<_> = Portion::number(vec!['a', 'b', 'c'], Time(9)).collect();
        sent.swap(0, 2);
        let mut assembly = Assembly::default();
        let [last, middle, first] = [sent[0], sent[1], sent[2]];
        assert_eq!(assembly.add(last.0, last.1), None);
        assert_eq!(assembly.add(middle.0, middle.1), None);
        assert_eq!(assembly.add(last.0, last.1), None, "came twice");
        assert_eq!(assembly.add(first.0, first.1), Some(vec!['a', 'b', 'c']));
    }

    #[test]
    fn parts_of_two_moments_are_not() {
        let mut assembly = Assembly::default();
        let sent = |now| Portion::number(vec![now, now], Time(now)).collect::<Vec<_>>();
        let (old, new) = (sent(1), sent(2));
        assert_eq!(assembly.add(old[0].0, old[0].1), None);
        assert_eq!(assembly.add(new[1].0, new[1].1), None);
        assert_eq!(assembly.add(new[0].0, new[0].1), Some(vec![2, 2]));
        let whole = Portion::number(vec![7], Time(3)).next();
        assert_eq!(whole, Some((Portion::WHOLE, 7)));
        assert_eq!(assembly.add(Portion::WHOLE, 7), Some(vec![7]));
    }
}
