//! Which elements a command takes that Redis would draw at random.
//!
//! Every replica that runs a script must find the same. So the choice depends on the transaction
//! and on the number of elements, and on nothing else.

use bytes::Bytes;

use super::entry::Stamp;
use super::parse::Args;
use super::reply::{Failure, SYNTAX};
use crate::rng::Rng;

/// Numbers that follow from a transaction.
fn draws(stamp: Stamp) -> Rng {
    Rng::stream(stamp.client, "redis", stamp.counter)
}

/// A place in a list of this many elements.
fn place(draws: &mut Rng, size: usize) -> usize {
    usize::try_from(draws.below(size as u64)).unwrap_or(0)
}

/// The elements that a command answers: `count` different ones, or with repetitions if the number
/// is negative.
pub(super) fn choose<T: Clone>(stamp: Stamp, count: i64, mut all: Vec<T>) -> Vec<T> {
    let size = all.len();
    if size == 0 {
        return all;
    }
    let many = usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX);
    let mut draws = draws(stamp);
    if count < 0 {
        return (0..many).filter_map(|_| all.get(place(&mut draws, size)).cloned()).collect();
    }
    if many < size {
        for at in 0..many {
            all.swap(at, at + place(&mut draws, size - at));
        }
        all.truncate(many);
    }
    all
}

/// What a command with this number does besides passing over the value: the elements that it
/// answers with repetitions, in bytes.
pub(super) fn work(count: Option<i64>) -> usize {
    let repeated = count.filter(|count| *count < 0).map_or(0, i64::unsigned_abs);
    usize::try_from(repeated).unwrap_or(usize::MAX).saturating_mul(REPEATED_BYTES)
}

/// The work for one element of an answer with repetitions.
const REPEATED_BYTES: usize = 64;

/// The number of elements to choose, if the command has one, and whether the word `with` follows.
pub(super) fn parse(
    args: &mut Args<'_>,
    with: Option<&str>,
) -> Result<(Option<i64>, bool), Failure> {
    if args.left() == 0 {
        return Ok((None, false));
    }
    if with.is_none() && args.left() > 1 {
        return Err(SYNTAX);
    }
    let count = args.integer()?;
    if count == i64::MIN {
        return Err(Failure::new(
            "ERR value is out of range, value must between -9223372036854775807 and \
             9223372036854775807",
        ));
    }
    let is_with = with.is_some_and(|word| args.takes(word));
    if args.left() > 0 {
        return Err(SYNTAX);
    }
    if is_with && count.unsigned_abs() > i64::MAX.unsigned_abs() / 2 {
        return Err(Failure::new("ERR value is out of range"));
    }
    Ok((Some(count), is_with))
}

/// One element, for a command without a number.
pub(super) fn one<'a>(
    stamp: Stamp,
    mut all: impl ExactSizeIterator<Item = &'a Bytes>,
) -> Option<&'a Bytes> {
    let size = all.len();
    all.nth(place(&mut draws(stamp), size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ordered::OrdSet;

    #[test]
    fn each_element_is_chosen_as_often_as_others() {
        let mut chosen = [0_usize; 7];
        for counter in 0..7_000 {
            let one = choose(Stamp { client: 3, counter }, 1, (0..7_usize).collect());
            chosen[one[0]] += 1;
        }
        assert!(chosen.iter().all(|times| (850..1_150).contains(times)), "{chosen:?}");
    }

    #[test]
    fn a_positive_number_chooses_different_elements() {
        let stamp = Stamp { client: 1, counter: 2 };
        for count in 0..12 {
            let found = choose(stamp, count, (0..9).collect());
            let different: OrdSet<i32> = found.iter().copied().collect();
            assert_eq!(different.len(), found.len());
            assert_eq!(found.len(), usize::try_from(count).unwrap().min(9));
        }
        assert_eq!(choose(stamp, -40, vec![0, 1]).len(), 40);
        assert!(choose::<u8>(stamp, -40, Vec::new()).is_empty());
        assert_eq!(choose(stamp, -5, vec![0, 1, 2]), choose(stamp, -5, vec![0, 1, 2]));
    }
}
