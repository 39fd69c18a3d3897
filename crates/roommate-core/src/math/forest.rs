//! Random forests: the mean of many trees, each grown on rows drawn with replacement and splitting
//! on a few features drawn at each node (Breiman, 2001). Seeded, so the same rows give the same
//! forest.

use crate::math::rng::Rng;

/// Parameters of a forest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Number of trees.
    pub trees: usize,
    /// Smallest number of rows in a leaf.
    pub min_leaf: usize,
    /// Largest number of splits between the root and a leaf.
    pub depth: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { trees: 40, min_leaf: 1, depth: 12, seed: 0 }
    }
}

/// A node: a split, or the value of a leaf.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Node {
    /// Rows whose feature is at most `at` go to the next node, the others to `right`.
    Ask {
        feature: u16,
        at: f64,
        right: u32,
    },
    Leaf(f64),
}

/// A grown forest.
#[derive(Clone, Debug, PartialEq)]
pub struct Forest {
    features: usize,
    /// Trees in preorder.
    trees: Vec<Vec<Node>>,
}

/// Why no forest can be grown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// There are no rows, or rows without features.
    #[error("a forest needs rows with at least one feature")]
    Empty,
    /// Rows of different lengths, or a target missing.
    #[error("rows and targets differ in number, or rows in length")]
    Shape,
    /// A value that is NaN or infinite.
    #[error("a feature or a target is not a finite number")]
    NotFinite,
}

impl Forest {
    /// Grows a forest.
    pub fn grow(rows: &[Vec<f64>], targets: &[f64], options: Options) -> Result<Self, Misfit> {
        let features = rows.first().map_or(0, Vec::len);
        if features == 0 {
            return Err(Misfit::Empty);
        } else if rows.len() != targets.len() || rows.iter().any(|r| r.len() != features) {
            return Err(Misfit::Shape);
        } else if !rows.iter().flatten().chain(targets).all(|v| v.is_finite()) {
            return Err(Misfit::NotFinite);
        }
        let tree = |i: usize| {
            let mut rng = Rng::stream(options.seed, i as u64);
            let draw = |rng: &mut Rng| rng.below(rows.len() as u64) as u32;
            let mut drawn: Vec<u32> = rows.iter().map(|_| draw(&mut rng)).collect();
            let mut nodes = Vec::new();
            let mut grower = Grower { rows, targets, options, rng, features };
            grower.branch(&mut drawn, 0, &mut nodes);
            nodes
        };
        Ok(Self { features, trees: (0..options.trees.max(1)).map(tree).collect() })
    }

    /// Prediction for a row, and the standard deviation over trees.
    pub fn predict(&self, row: &[f64]) -> (f64, f64) {
        assert_eq!(row.len(), self.features, "a forest knows rows of one length");
        let (mut sum, mut squares) = (0.0, 0.0);
        for tree in &self.trees {
            let value = descend(tree, row);
            sum += value;
            squares += value * value;
        }
        let n = self.trees.len() as f64;
        let mean = sum / n;
        (mean, (squares / n - mean * mean).max(0.0).sqrt())
    }
}

fn descend(tree: &[Node], row: &[f64]) -> f64 {
    let mut at = 0;
    loop {
        match tree[at] {
            Node::Leaf(value) => return value,
            Node::Ask { feature, at: limit, right } => {
                let left = row[usize::from(feature)] <= limit;
                at = if left { at + 1 } else { right as usize };
            }
        }
    }
}

struct Grower<'a> {
    rows: &'a [Vec<f64>],
    targets: &'a [f64],
    options: Options,
    rng: Rng,
    features: usize,
}

impl Grower<'_> {
    fn branch(&mut self, drawn: &mut [u32], depth: usize, nodes: &mut Vec<Node>) {
        let asked = if depth < self.options.depth { self.question(drawn) } else { None };
        let Some((feature, at)) = asked else {
            let sum: f64 = drawn.iter().map(|r| self.targets[*r as usize]).sum();
            nodes.push(Node::Leaf(sum / drawn.len() as f64));
            return;
        };
        let here = nodes.len();
        nodes.push(Node::Leaf(0.0));
        // Sorted by feature and row, so that the order does not depend on previous sorts.
        drawn.sort_by(|a, b| self.by(feature, *a, *b));
        let left = drawn.partition_point(|r| self.rows[*r as usize][feature] <= at);
        let (low, high) = drawn.split_at_mut(left);
        self.branch(low, depth + 1, nodes);
        nodes[here] = Node::Ask { feature: feature as u16, at, right: nodes.len() as u32 };
        self.branch(high, depth + 1, nodes);
    }

    fn by(&self, feature: usize, a: u32, b: u32) -> std::cmp::Ordering {
        let of = |r: u32| self.rows[r as usize][feature];
        of(a).total_cmp(&of(b)).then(a.cmp(&b))
    }

    /// The split on one of a few features that leaves the least variance; `None` without a gain.
    fn question(&mut self, drawn: &mut [u32]) -> Option<(usize, f64)> {
        let n = drawn.len();
        if n < 2 * self.options.min_leaf {
            return None;
        }
        let total: f64 = drawn.iter().map(|r| self.targets[*r as usize]).sum();
        let mut best: Option<(f64, usize, f64)> = None;
        // A third of the features, as usual for regression, but more where those give no split.
        let most = self.features.div_ceil(3).max(1);
        let mut order: Vec<usize> = (0..self.features).collect();
        let mut useful = 0;
        for i in 0..self.features {
            let other = i + self.rng.below((self.features - i) as u64) as usize;
            order.swap(i, other);
            let feature = order[i];
            drawn.sort_by(|a, b| self.by(feature, *a, *b));
            let mut left = 0.0;
            let value = |r: u32| self.rows[r as usize][feature];
            if value(drawn[0]) == value(drawn[n - 1]) {
                continue;
            }
            for k in 1..n {
                left += self.targets[drawn[k - 1] as usize];
                let (low, high) = (value(drawn[k - 1]), value(drawn[k]));
                let few = k < self.options.min_leaf || n - k < self.options.min_leaf;
                if low == high || few {
                    continue;
                }
                let right = total - left;
                // Explained sum of squares: the larger, the less variance is left.
                let explained = left * left / k as f64 + right * right / (n - k) as f64;
                if best.is_none_or(|b| explained > b.0) {
                    best = Some((explained, feature, f64::midpoint(low, high)));
                }
            }
            useful += 1;
            if useful >= most && best.is_some() {
                break;
            }
        }
        let gained = |b: &(f64, usize, f64)| b.0 > total * total / n as f64 + 1e-12;
        best.filter(gained).map(|(_, feature, at)| (feature, at))
    }
}

/// A forest that is refitted as rows arrive.
#[derive(Clone, Debug)]
pub struct Online {
    options: Options,
    rows: Vec<Vec<f64>>,
    targets: Vec<f64>,
    forest: Option<Forest>,
    /// Number of rows since the last fit.
    news: usize,
}

/// Number of rows that are kept, the newest ones.
const KEPT: usize = 600;

impl Online {
    /// A forest without rows.
    pub fn new(options: Options) -> Self {
        let (rows, targets) = (Vec::new(), Vec::new());
        Self { options, rows, targets, forest: None, news: 0 }
    }

    /// Adds a row; rows of another length than the first, or with a value that is not finite, are
    /// refused.
    pub fn push(&mut self, row: Vec<f64>, target: f64) -> bool {
        let shape = self.rows.first().is_none_or(|r| r.len() == row.len());
        let finite = row.iter().chain([&target]).all(|v| v.is_finite());
        if !shape || !finite || row.is_empty() {
            return false;
        }
        if self.rows.len() >= KEPT {
            self.rows.remove(0);
            self.targets.remove(0);
        }
        self.rows.push(row);
        self.targets.push(target);
        self.news += 1;
        true
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Refits the forest once there are a tenth more rows; returns whether it did.
    pub fn refresh(&mut self) -> bool {
        let grows = self.forest.is_none() || self.news > self.rows.len() / 10;
        if grows {
            self.forest = Forest::grow(&self.rows, &self.targets, self.options).ok();
            self.news = 0;
        }
        grows
    }

    /// Prediction for a row and the standard deviation over trees; `None` before the first fit.
    pub fn predict(&self, row: &[f64]) -> Option<(f64, f64)> {
        self.forest.as_ref().map(|f| f.predict(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rng: &mut Rng, n: usize, features: usize) -> Vec<Vec<f64>> {
        (0..n).map(|_| (0..features).map(|_| rng.unit()).collect()).collect()
    }

    fn truth(row: &[f64]) -> f64 {
        2.0 * row[0] + f64::from(row[1] > 0.5) + row[0] * row[2]
    }

    #[test]
    fn a_forest_finds_what_matters() {
        let mut rng = Rng::stream(1, 103);
        let (seen, new) = (rows(&mut rng, 400, 5), rows(&mut rng, 200, 5));
        let targets: Vec<f64> = seen.iter().map(|r| truth(r) + 0.05 * rng.normal()).collect();
        let forest = Forest::grow(&seen, &targets, Options::default()).unwrap();
        let mean = targets.iter().sum::<f64>() / 400.0;
        let error = |of: &dyn Fn(&[f64]) -> f64| {
            new.iter().map(|r| (of(r) - truth(r)).abs()).sum::<f64>() / 200.0
        };
        let (ours, flat) = (error(&|r| forest.predict(r).0), error(&|_| mean));
        assert!(ours < 0.35 * flat, "{ours} {flat}");
        // The artifact's forest had no features, and so gave the same prediction for everything.
        let said: Vec<f64> = new.iter().map(|r| forest.predict(r).0).collect();
        assert!(said.iter().any(|v| (v - said[0]).abs() > 0.5));
    }

    #[test]
    fn the_same_seed_gives_the_same_forest_within_the_range() {
        let mut rng = Rng::stream(2, 103);
        let seen = rows(&mut rng, 60, 3);
        let targets: Vec<f64> = seen.iter().map(|r| truth(r)).collect();
        let grow = |seed| Forest::grow(&seen, &targets, Options { seed, ..Options::default() });
        assert_eq!(grow(1), grow(1));
        assert_ne!(grow(1), grow(2));
        let (least, most) = (targets.iter().copied().fold(f64::MAX, f64::min), 4.0);
        for row in rows(&mut rng, 100, 3) {
            let (value, spread) = grow(3).unwrap().predict(&row);
            assert!(value >= least && value <= most && spread >= 0.0);
        }
    }

    #[test]
    fn shapes_are_checked() {
        let grow = |rows: &[Vec<f64>], targets: &[f64]| {
            Forest::grow(rows, targets, Options::default()).err()
        };
        assert_eq!(grow(&[], &[]), Some(Misfit::Empty));
        assert_eq!(grow(&[vec![]], &[1.0]), Some(Misfit::Empty));
        assert_eq!(grow(&[vec![1.0], vec![1.0, 2.0]], &[1.0, 2.0]), Some(Misfit::Shape));
        assert_eq!(grow(&[vec![1.0]], &[]), Some(Misfit::Shape));
        assert_eq!(grow(&[vec![f64::NAN]], &[1.0]), Some(Misfit::NotFinite));
        let mut online = Online::new(Options::default());
        assert!(online.push(vec![1.0], 2.0) && !online.push(vec![1.0, 2.0], 2.0));
        assert!(!online.push(vec![f64::INFINITY], 2.0));
        assert_eq!((online.len(), online.predict(&[1.0])), (1, None));
        online.refresh();
        assert_eq!(online.predict(&[7.0]), Some((2.0, 0.0)));
    }

    #[test]
    fn a_forest_that_learns_gets_better_and_forgets_the_oldest() {
        let mut rng = Rng::stream(3, 103);
        let mut online = Online::new(Options::default());
        let mut errors = Vec::new();
        for (i, row) in rows(&mut rng, KEPT + 50, 3).into_iter().enumerate() {
            if let Some((said, _)) = online.predict(&row) {
                errors.push((said - truth(&row)).abs());
            }
            let target = truth(&row);
            assert!(online.push(row, target));
            if i % 10 == 0 {
                online.refresh();
            }
        }
        let mean = |e: &[f64]| e.iter().sum::<f64>() / e.len() as f64;
        assert!(mean(&errors[500..]) < 0.5 * mean(&errors[..50]));
        assert_eq!(online.len(), KEPT);
    }
}
