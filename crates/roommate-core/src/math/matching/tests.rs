//! Vectors of the published matcher, its slow literal twin, and exhaustive search for small graphs.

mod literal;
mod muri;

use super::*;
use crate::math::rng::Rng;

/// Partners as printed in the vectors: 1-based, 0 for none.
fn printed(mates: &[u32]) -> Vec<u32> {
    mates.iter().map(|m| m.wrapping_add(1)).collect()
}

fn check(n: usize, weight: impl Fn(usize, usize) -> f64, mates: &[u32]) {
    // The formulas are in 1-based indices with the smaller first.
    let ordered = |u: usize, v: usize| weight(u.min(v) + 1, u.max(v) + 1);
    assert_eq!(printed(Matcher::new().solve(n, ordered)), mates);
}

#[test]
fn published_vectors() {
    let eighth = |k: usize| (k + 1) as f64 / 8.0;
    check(4, |_, _| 1.0, &[2, 1, 4, 3]);
    check(5, |_, _| 1.0, &[2, 1, 4, 3, 0]);
    check(7, |_, _| 0.5, &[2, 1, 4, 3, 6, 5, 0]);
    check(6, |i, j| eighth(i * j % 5), &[4, 5, 6, 1, 2, 3]);
    check(8, |i, j| ((i + 2 * j) % 3 + 1) as f64 / 4.0, &[2, 1, 4, 3, 6, 5, 8, 7]);
    check(9, |i, j| eighth((i * i + j) % 4), &[2, 1, 9, 7, 6, 5, 4, 0, 3]);
    let mates = [6, 4, 5, 2, 3, 1, 11, 9, 8, 12, 7, 10];
    check(12, |i, j| ((3 * i + 5 * j) % 7 + 1) as f64 / 16.0, &mates);
    let mates = [6, 9, 4, 3, 8, 1, 12, 5, 2, 13, 0, 7, 10];
    check(13, |i, j| eighth((i * j + i + j) % 5), &mates);
}

#[test]
fn the_published_matcher_is_not_always_mutual() {
    let nodes = "RR RR RS SR RR RR SS RR RS RS SS RR RS SS";
    let nodes: Vec<Vec<muri::Stages>> = nodes.split(' ').map(muri::group).collect();
    let weight = |u: usize, v: usize| muri::gamma(&[&nodes[u][..], &nodes[v][..]].concat());
    assert_eq!(weight(0, 2), 0.449_630_101_381_362_17);
    assert_eq!(weight(2, 0), 0.449_630_101_381_362_06);
    assert_ne!(weight(0, 2), weight(2, 0));
    let mates = [13, 3, 2, 9, 14, 10, 8, 7, 4, 6, 12, 11, 2, 5];
    assert_eq!(printed(Matcher::new().solve(14, weight)), mates);
    assert_eq!(literal::solve(14, weight), mates);
}

/// A random graph of one of several kinds: few values, many values, holes, last-bit asymmetry.
fn random_graph(rng: &mut Rng, n: usize) -> Vec<f64> {
    let (values, holes) = ([1, 2, 3, 5, 40][rng.below(5) as usize], rng.below(4) as f64 / 5.0);
    let (scale, shaky) = (0.1 + rng.unit(), rng.chance(0.5));
    let mut w = vec![0.0; n * n];
    for u in 0..n {
        for v in u + 1..n {
            if !rng.chance(holes) {
                let value = (rng.below(values) + 3) as f64 * scale;
                w[u * n + v] = value;
                w[v * n + u] = if shaky && rng.chance(0.3) { value.next_up() } else { value };
            }
        }
    }
    w
}

/// Nodes with a few Muri profiles, as one bucket of the real policy has them.
fn random_muri(rng: &mut Rng, n: usize, models: u64, most: u64) -> Vec<f64> {
    let groups: Vec<Vec<muri::Stages>> = (0..n)
        .map(|_| {
            let size = 1 + rng.below(most);
            (0..size).map(|_| muri::PROFILES[rng.below(models) as usize]).collect()
        })
        .collect();
    let mut w = vec![0.0; n * n];
    for u in 0..n {
        for v in 0..n {
            if u != v && groups[u].len() + groups[v].len() <= 4 {
                w[u * n + v] = muri::gamma(&[&groups[u][..], &groups[v][..]].concat());
            }
        }
    }
    w
}

#[test]
fn released_agrees_with_its_literal_twin() {
    let mut rng = Rng::new(1);
    let mut matcher = Matcher::new();
    let mut lopsided = 0;
    for round in 0..6000 {
        let n = if round % 60 == 0 { 60 + rng.below(40) } else { rng.below(26) } as usize;
        let w = if round % 4 == 0 {
            let models = 2 + rng.below(7);
            random_muri(&mut rng, n, models, 3)
        } else {
            random_graph(&mut rng, n)
        };
        let mates = printed(matcher.solve(n, |u, v| w[u * n + v]));
        assert_eq!(mates, literal::solve(n, |u, v| w[u * n + v]), "round {round}: {w:?}");
        let points_back =
            |u: usize| mates[u] == 0 || mates[mates[u] as usize - 1] as usize == u + 1;
        lopsided += usize::from(!(0..n).all(points_back));
    }
    assert!(lopsided > 0, "the oddity is among what is compared");
}

/// The weight of the heaviest matching, by exhaustive search.
fn brute(n: usize, weight: impl Fn(usize, usize) -> f64) -> f64 {
    let mut best = vec![0.0f64; 1 << n];
    for set in 1..1usize << n {
        let u = set.trailing_zeros() as usize;
        let rest = set & (set - 1);
        best[set] = best[rest];
        for v in (u + 1..n).filter(|v| rest >> v & 1 == 1) {
            best[set] = best[set].max(best[rest & !(1 << v)] + weight(u, v));
        }
    }
    best[(1 << n) - 1]
}

/// Heaviest edge first; at least half of the maximum.
fn greedy(n: usize, weight: impl Fn(usize, usize) -> f64) -> f64 {
    let mut edges: Vec<(f64, usize, usize)> = (0..n)
        .flat_map(|u| (u + 1..n).map(move |v| (u, v)))
        .map(|(u, v)| (weight(u, v), u, v))
        .collect();
    edges.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut used, mut total) = (vec![false; n], 0.0);
    for (w, u, v) in edges {
        if !used[u] && !used[v] {
            (used[u], used[v]) = (true, true);
            total += w;
        }
    }
    total
}

/// Total weight of mutual pairs; a pair without an edge is an error.
fn total(mates: &[u32], weight: impl Fn(usize, usize) -> f64) -> f64 {
    let mut sum = 0.0;
    for (u, &v) in mates.iter().enumerate().filter(|(_, v)| **v != NONE) {
        let v = v as usize;
        assert_eq!(mates[v] as usize, u, "mutual");
        assert!(weight(u.min(v), u.max(v)) > 0.0, "a pair has an edge");
        if u < v {
            sum += weight(u, v);
        }
    }
    sum
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

#[test]
fn exact_is_as_heavy_as_trying_everything() {
    let mut rng = Rng::new(2);
    let mut exact = Exact::new();
    for round in 0..8000 {
        let n = rng.below(11) as usize;
        let w =
            if round % 5 == 0 { random_muri(&mut rng, n, 8, 3) } else { random_graph(&mut rng, n) };
        let weight = |u: usize, v: usize| w[u * n + v];
        let found = total(exact.solve(n, weight), weight);
        assert!(close(found, brute(n, weight)), "round {round}: {found} {w:?}");
    }
}

#[test]
fn released_is_optimal_when_its_tolerance_allows() {
    let mut rng = Rng::new(3);
    for _ in 0..3000 {
        let n = rng.below(11) as usize;
        let k = 1 + rng.below(6);
        let table: Vec<f64> = (0..n * n).map(|_| rng.below(k) as f64).collect();
        let weight = |u: usize, v: usize| table[u.min(v) * n + u.max(v)];
        let found = total(Matcher::new().solve(n, weight), weight);
        assert_eq!(found, brute(n, weight));
    }
}

#[test]
fn exact_is_never_below_greedy_and_scales() {
    let mut rng = Rng::new(4);
    let mut exact = Exact::new();
    for _ in 0..300 {
        let n = rng.below(70) as usize;
        let w = random_graph(&mut rng, n);
        let weight = |u: usize, v: usize| w[u * n + v];
        let found = total(exact.solve(n, weight), weight);
        assert!(found >= greedy(n, weight) * (1.0 - 1e-9));
        for by in [3.7e-200, 0.1, 7.0, 1e200] {
            let scaled = |u: usize, v: usize| weight(u, v) * by;
            assert!(close(total(exact.solve(n, scaled), scaled), found * by));
        }
    }
}

/// A random table of class weights of several kinds, and the class of each vertex.
fn random_classes(rng: &mut Rng, n: usize, classes: usize) -> (Vec<u32>, Vec<f64>) {
    let (values, holes) = ([1, 2, 3, 10, 1000][rng.below(5) as usize], rng.below(5) as f64 / 5.0);
    let loops = rng.chance(0.5);
    let mut w = vec![0.0; classes * classes];
    for i in 0..classes {
        for j in i..classes {
            if !rng.chance(holes) && (i < j || loops) {
                w[i * classes + j] = (rng.below(values) + values) as f64 / 7.0;
                w[j * classes + i] = w[i * classes + j];
            }
        }
    }
    ((0..n).map(|_| rng.below(classes as u64) as u32).collect(), w)
}

#[test]
fn classes_are_matched_as_heavily_as_vertices() {
    let mut rng = Rng::new(6);
    let (mut matcher, mut exact) = (ClassMatcher::new(), Exact::new());
    let (mut proved, rounds) = (0, 3000);
    for round in 0..rounds {
        let n = if round % 10 == 0 { 300 } else { 10 + rng.below(80) as usize };
        let classes = 1 + rng.below(12) as usize;
        let (class_of, w) = random_classes(&mut rng, n, classes);
        let table = |i: usize, j: usize| w[i * classes + j];
        let weight = |u: usize, v: usize| table(class_of[u] as usize, class_of[v] as usize);
        let pairing = matcher.solve(&class_of, classes, table);
        assert!(close(total(&pairing.mates, weight), pairing.total));
        let heaviest = total(exact.solve(n, weight), weight);
        assert!(
            pairing.total <= heaviest * (1.0 + 1e-9) && pairing.bound >= heaviest * (1.0 - 1e-9)
        );
        if pairing.bound == pairing.total {
            proved += 1;
            assert!(close(pairing.total, heaviest), "round {round}: {} {heaviest}", pairing.total);
        }
        if n <= 14 {
            assert!(close(heaviest, brute(n, weight)));
        }
    }
    assert_eq!(proved, rounds, "the bound is for what has not been met yet");
}

#[test]
fn ten_thousand_vertices_of_48_classes_are_proved_maximal() {
    let mut rng = Rng::new(7);
    let mut matcher = ClassMatcher::new();
    let classes = 48;
    for round in 0..12 {
        let groups: Vec<Vec<muri::Stages>> = (0..classes)
            .map(|_| (0..=round % 2).map(|_| muri::PROFILES[rng.below(8) as usize]).collect())
            .collect();
        let class_of: Vec<u32> = (0..10_000).map(|_| rng.below(classes as u64) as u32).collect();
        let table = |i: usize, j: usize| muri::gamma(&[&groups[i][..], &groups[j][..]].concat());
        let pairing = matcher.solve(&class_of, classes, table);
        assert_eq!(pairing.bound, pairing.total);
        let weight = |u: usize, v: usize| {
            let (i, j) = (class_of[u] as usize, class_of[v] as usize);
            table(i.min(j), i.max(j))
        };
        assert!(close(total(&pairing.mates, weight), pairing.total));
    }
}

#[test]
fn the_bound_is_never_below_the_heaviest_by_trying_everything() {
    let mut rng = Rng::new(8);
    let mut matcher = ClassMatcher::new();
    for _ in 0..2000 {
        let (n, classes) = (rng.below(11) as usize, 1 + rng.below(5) as usize);
        let (class_of, w) = random_classes(&mut rng, n, classes);
        let weight = |u: usize, v: usize| w[class_of[u] as usize * classes + class_of[v] as usize];
        let pairing = matcher.solve(&class_of, classes, |i, j| w[i * classes + j]);
        assert!(close(pairing.total, brute(n, weight)) && pairing.bound == pairing.total);
    }
}

#[test]
fn an_odd_ring_of_classes_needs_more_than_the_relaxed_answer() {
    // Three classes of 101, no pairs within a class: 303 vertices, one must stay unmatched.
    let class_of: Vec<u32> = (0..303).map(|u| u % 3).collect();
    let pairing = ClassMatcher::new().solve(&class_of, 3, |i, j| f64::from(i != j));
    assert_eq!((pairing.total, pairing.bound), (151.0, 151.0));
    // One class of 1001 that pairs with itself, another that pairs with none.
    let class_of: Vec<u32> = (0..2002).map(|u| u % 2).collect();
    let pairing = ClassMatcher::new().solve(&class_of, 2, |i, j| f64::from(i + j == 0));
    assert_eq!((pairing.total, pairing.bound), (500.0, 500.0));
    assert_eq!(
        pairing.mates.iter().position(|&v| v == NONE),
        Some(1),
        "vertices without edges stay unmatched"
    );
    assert_eq!(pairing.mates[2000], NONE, "and the last of those that could be paired");
}

#[test]
fn an_empty_graph_has_an_empty_matching() {
    assert!(Matcher::new().solve(0, |_, _| 1.0).is_empty());
    assert_eq!(Exact::new().solve(1, |_, _| 1.0), [NONE]);
    assert_eq!(Exact::new().solve(3, |_, _| 0.0), [NONE; 3]);
    let nothing = ClassMatcher::new().solve(&[], 0, |_, _| 1.0);
    assert_eq!((nothing.mates.len(), nothing.total, nothing.bound), (0, 0.0, 0.0));
    let alone = ClassMatcher::new().solve(&[0; 40], 1, |_, _| 0.0);
    assert_eq!((alone.total, alone.bound), (0.0, 0.0));
}
