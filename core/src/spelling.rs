//! The name that somebody probably meant.

/// The part of an error that proposes a name: ` (did you mean "azure5"?)`, or nothing if no known
/// name is similar.
#[must_use]
pub fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match closest(given, known) {
        Some(name) => format!(" (did you mean {name:?}?)"),
        None => String::new(),
    }
}

/// The known name that is most similar to `given`: one that it begins, or one with few other
/// letters.
fn closest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let given: Vec<char> = given.to_lowercase().chars().take(64).collect();
    let scored = known.into_iter().filter_map(|name| {
        let letters: Vec<char> = name.to_lowercase().chars().collect();
        let is_start = given.len() >= 3 && letters.starts_with(&given);
        let distance = if is_start { 0 } else { distance(&given, &letters) };
        let allowed = given.len().max(letters.len()) / 3;
        (distance <= allowed).then_some((distance, name))
    });
    scored.min_by_key(|(distance, _)| *distance).map(|(_, name)| name)
}

/// The number of letters to insert, remove, replace or exchange with their neighbours.
fn distance(a: &[char], b: &[char]) -> usize {
    let at = |row: &[usize], column: usize| row.get(column).copied().unwrap_or(usize::MAX / 2);
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    let mut letter_before = None;
    for (i, &x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        let mut other_before = None;
        for (j, &y) in b.iter().enumerate() {
            let replaced = at(&last, j) + usize::from(x != y);
            let mut best = replaced.min(at(&last, j + 1) + 1).min(at(&row, j) + 1);
            if letter_before == Some(y) && other_before == Some(x) && j > 0 {
                best = best.min(at(&before_last, j - 1) + 1);
            }
            row.push(best);
            other_before = Some(y);
        }
        before_last = std::mem::replace(&mut last, row);
        letter_before = Some(x);
    }
    at(&last, b.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_similar_name_is_proposed() {
        let known = ["carousel-basic", "carousel-fast", "natto-ts", "2pl", "azure5", "azure6"];
        let meant = |given| closest(given, known);
        assert_eq!(meant("carousel"), Some("carousel-basic"));
        assert_eq!(meant("carousal-fast"), Some("carousel-fast"));
        assert_eq!(meant("CarouselFast"), Some("carousel-fast"));
        assert_eq!(meant("natto"), Some("natto-ts"));
        assert_eq!(meant("azrue6"), Some("azure6"));
        assert_eq!(meant("2lp"), Some("2pl"));
        assert_eq!(meant("spanner"), None);
        assert_eq!(meant(""), None);
        assert_eq!(did_you_mean("azure", known), " (did you mean \"azure5\"?)");
        assert_eq!(did_you_mean("postgres", known), "");
    }

    #[test]
    fn distances_count_changes() {
        let between = |a: &str, b: &str| {
            let [a, b] = [a, b].map(|text| text.chars().collect::<Vec<_>>());
            distance(&a, &b)
        };
        assert_eq!(between("", "abc"), 3);
        assert_eq!(between("abc", "abc"), 0);
        assert_eq!(between("abc", "acb"), 1);
        assert_eq!(between("kitten", "sitting"), 3);
    }
}
