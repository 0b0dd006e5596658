//! The published figures that can be repeated.

/// A published figure and the related ones that show the same.
pub struct Id {
    /// The short name.
    pub name: &'static str,
    /// Further experiments of this figure, besides those with its name, alone or with a suffix
    /// (`G7`, `G7-low`).
    others: &'static [&'static str],
}

const fn id(name: &'static str) -> Id {
    Id { name, others: &[] }
}

/// All figures, ordered by paper.
pub const IDS: &[Id] = &[
    id("C4"),
    id("C5"),
    id("C7"),
    id("C8"),
    id("N7a"),
    id("N7c"),
    id("N7e"),
    id("N8a"),
    id("N8b"),
    id("N9"),
    id("N10"),
    id("N11"),
    id("N12"),
    id("N14"),
    id("O3"),
    id("O4"),
    Id { others: &["O7"], ..id("O5") },
    id("O6"),
    id("S1"),
    id("S2"),
    id("S4"),
    id("G5"),
    id("G7"),
    id("G9"),
    id("G10"),
    id("G12"),
    id("GT1"),
    id("G13"),
    id("G14"),
    id("G15"),
];

impl Id {
    /// Whether an experiment belongs to this figure.
    pub fn has(&self, experiment: &str) -> bool {
        let rest = experiment.strip_prefix(self.name);
        self.others.contains(&experiment)
            || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }
}

#[cfg(test)]
mod tests {
    use super::super::experiment::Experiment;
    use super::*;

    #[test]
    fn every_figure_has_experiments_and_every_experiment_belongs_to_one_figure() {
        let experiments = Experiment::all().unwrap();
        for id in IDS {
            assert!(experiments.iter().any(|one| id.has(&one.id)), "{}", id.name);
        }
        for experiment in experiments {
            let owners = IDS.iter().filter(|id| id.has(&experiment.id)).map(|id| id.name);
            assert_eq!(owners.count(), 1, "{}", experiment.id);
        }
        assert_eq!(IDS.len(), 30);
    }
}
