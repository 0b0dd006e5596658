//! A range of seeds on the command line.

use std::fmt;
use std::str::FromStr;

/// Seeds from `first` up to but not including `end`; never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seeds {
    /// The first seed.
    pub first: u64,
    /// The seed after the last.
    pub end: u64,
}

impl Seeds {
    /// The number of seeds.
    pub fn len(self) -> u64 {
        self.end - self.first
    }
}

impl fmt::Display for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.first, self.end)
    }
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ends = text.split_once("..").map(|(first, end)| (first.parse(), end.parse()));
        match ends {
            Some((Ok(first), Ok(end))) if first < end => Ok(Self { first, end }),
            Some((Ok(_), Ok(_))) => {
                Err("the range is empty: the second number is excluded; use A..B with A < B".into())
            }
            Some(_) | None => Err("use a range such as 0..200 (200 seeds, 0 to 199)".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_excludes_its_end_and_is_not_empty() {
        assert_eq!("3..5".parse::<Seeds>().map(Seeds::len), Ok(2));
        for text in ["", "3", "3..", "..5", "5..5", "5..3", "-1..3", "0..=3"] {
            assert!(text.parse::<Seeds>().is_err(), "{text:?}");
        }
    }
}
