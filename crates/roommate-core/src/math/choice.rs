//! Choosing one option for each of many items so that the sum of gains is largest and the sums of
//! costs stay within budgets (a multiple-choice knapsack). Equal items form a class and are
//! counted, so the program grows with the classes and not with the items.

use super::lp::{Answer, Cmp, Lp, Var};

/// Budgets that options draw on.
pub const BUDGETS: usize = 2;

/// An option for an item of a class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Gain of the option.
    pub gain: f64,
    /// Cost of the option in each budget.
    pub cost: [f64; BUDGETS],
}

/// A class of equal items.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// Number of items.
    pub count: u32,
    /// The options of each item.
    pub options: Vec<Choice>,
}

/// How many items of each class get each option.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// By class, by option.
    pub counts: Vec<Vec<u32>>,
    /// Whether it is proved optimal.
    pub proved: bool,
}

/// The best choice, or the best found in a search of this many nodes; `None` if none exists or none
/// was found. An infinite budget is no constraint.
pub fn choose(classes: &[Class], budgets: [f64; BUDGETS], nodes: u64) -> Option<Chosen> {
    let mut lp = Lp::maximize();
    lp.limit_nodes(nodes);
    let mut vars: Vec<Vec<Var>> = Vec::with_capacity(classes.len());
    for class in classes {
        let most = i32::try_from(class.count).ok()?;
        let of_class: Vec<Var> =
            class.options.iter().map(|o| lp.whole_var(o.gain, 0, most)).collect();
        lp.row(of_class.iter().map(|v| (*v, 1.0)), Cmp::Eq, f64::from(class.count));
        vars.push(of_class);
    }
    for (b, budget) in budgets.into_iter().enumerate().filter(|(_, b)| b.is_finite()) {
        let all = classes.iter().zip(&vars).flat_map(|(c, vars)| c.options.iter().zip(vars));
        lp.row(all.map(|(option, var)| (*var, option.cost[b])), Cmp::Le, budget);
    }
    let answer = lp.solve();
    let proved = matches!(answer, Answer::Optimal(_));
    let solution = answer.solution()?;
    let whole = |v: &Var| solution.value(*v).round() as u32;
    let counts: Vec<Vec<u32>> = vars.iter().map(|vs| vs.iter().map(whole).collect()).collect();
    let complete = classes.iter().zip(&counts).all(|(c, n)| n.iter().sum::<u32>() == c.count);
    complete.then_some(Chosen { counts, proved })
}

/// The options that no other beats at no more cost, in their order.
pub fn undominated(options: &[Choice]) -> Vec<usize> {
    let beats = |(i, a): (usize, &Choice), (j, b): (usize, &Choice)| {
        let no_worse = a.gain >= b.gain && a.cost.iter().zip(b.cost).all(|(a, b)| *a <= b);
        no_worse && (a != b || i < j)
    };
    let beaten = |j: usize| {
        options.iter().enumerate().any(|(i, a)| i != j && beats((i, a), (j, &options[j])))
    };
    (0..options.len()).filter(|j| !beaten(*j)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    /// The largest gain by exhaustive search, one item after the other.
    fn slowly(things: &[&Class], budgets: [f64; BUDGETS]) -> Option<f64> {
        let Some((first, rest)) = things.split_first() else { return Some(0.0) };
        let tries = first.options.iter().filter_map(|o| {
            let left = std::array::from_fn(|b| budgets[b] - o.cost[b]);
            left.iter().all(|l| *l >= -1e-9).then(|| slowly(rest, left).map(|g| g + o.gain))?
        });
        tries.max_by(f64::total_cmp)
    }

    #[test]
    fn the_best_choice_is_as_good_as_trying_all() {
        let (mut found, mut none) = (0, 0);
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let mut option = || Choice {
                gain: (1 + rng.below(30)) as f64 / 10.0,
                cost: [(1 + rng.below(12)) as f64, (1 + rng.below(6)) as f64 * 20.83],
            };
            let mut classes: Vec<Class> = (0..3)
                .map(|i| Class { count: 1 + i % 2, options: (0..4).map(|_| option()).collect() })
                .collect();
            let budgets = [(4 + rng.below(30)) as f64, (4 + rng.below(20)) as f64 * 20.83];
            let things: Vec<Class> = classes.clone();
            let each: Vec<&Class> =
                things.iter().flat_map(|c| std::iter::repeat_n(c, c.count as usize)).collect();
            let slow = slowly(&each, budgets);
            for class in &mut classes {
                let kept = undominated(&class.options);
                class.options = kept.into_iter().map(|i| class.options[i]).collect();
            }
            let fast = choose(&classes, budgets, 10_000);
            let gain = fast.map(|f| {
                assert!(f.proved);
                let pairs = classes.iter().zip(&f.counts);
                let of = |(c, n): (&Class, &Vec<u32>)| -> f64 {
                    c.options.iter().zip(n).map(|(o, n)| o.gain * f64::from(*n)).sum()
                };
                pairs.map(of).sum::<f64>()
            });
            match (slow, gain) {
                (Some(a), Some(b)) => assert!((a - b).abs() < 1e-6, "seed {seed}: {a} {b}"),
                (a, b) => assert_eq!(a, b, "seed {seed}"),
            }
            if slow.is_some() { found += 1 } else { none += 1 }
        }
        assert!(found > 50 && none > 20, "{found} {none}");
    }
}
