/* Depth-bounded suffix trees with counts: the drafter's inner loops. See suffix_forest.py for what they compute; the
 * class there in plain Python is the twin of this file, and both must give the same drafts bit for bit.
 *
 * All trees share one pool of nodes, one hash table of edges (parent, first token) -> child and one store of texts. An
 * edge's tokens are a reference into a text. Every path from a root is the reference's own text read backwards as well
 * (text[position - depth of the parent ..]), so joining a node with its only child needs no other text. A text whose
 * suffixes were removed is kept while edges still refer to it; inserting moves references to the newest text.
 *
 * Structure is canonical: an inner node has two children or more, or a suffix ends at it. It depends on the suffixes in
 * the tree, not on the order in which they came, and so do counts, best children (largest count, then lowest token) and
 * drafts.
 */
#include "suffix_nodes.h"

/* ---- the interface ---- */

void *sf_new(int32_t depth, int32_t early_depth) {
    Forest *f = calloc(1, sizeof(Forest));
    if (!f) return NULL;
    f->depth = (uint32_t)depth;
    f->early_depth = (uint32_t)early_depth;
    f->slot_mask = 1023;
    f->slots = calloc(1024, sizeof(uint32_t));
    f->num_nodes = f->num_texts = 1; /* 0 means none */
    f->node_capacity = f->text_capacity = 64;
    f->nodes = calloc(64, sizeof(Node));
    f->texts = calloc(64, sizeof(Text));
    if (f->slots && f->nodes && f->texts) return f;
    free(f->slots), free(f->nodes), free(f->texts), free(f);
    return NULL;
}

void sf_delete(void *forest) {
    Forest *f = forest;
    for (uint32_t i = 1; i < f->num_texts; i++) free(f->texts[i].tokens);
    free(f->texts), free(f->nodes), free(f->slots), free(f);
}

/* A new tree; returns its root, 0 where memory is short. */
uint32_t sf_new_tree(void *forest) {
    Forest *f = forest;
    if (f->failed || reserve_nodes(f, 1)) return NONE;
    return new_node(f);
}

/* Gives an empty tree's root back; -1 where it is not empty. */
int32_t sf_delete_tree(void *forest, uint32_t root) {
    Forest *f = forest;
    if (f->nodes[root].child != NONE || f->nodes[root].count) return -1;
    f->nodes[root].next = f->free_node;
    f->free_node = root;
    f->live_nodes--;
    return 0;
}

/* A new text for up to two trees (0: none), whose suffixes from `begin` on will be inserted. */
uint32_t sf_new_text(void *forest, uint32_t first_root, uint32_t second_root, uint32_t begin) {
    Forest *f = forest;
    uint32_t text = f->free_text;
    if (f->failed) return NONE;
    if (text != NONE) {
        f->free_text = f->texts[text].begin;
    } else {
        if (f->num_texts == f->text_capacity) {
            Text *texts = realloc(f->texts, (size_t)f->text_capacity * 2 * sizeof(Text));
            if (!texts) return NONE;
            f->texts = texts;
            f->text_capacity *= 2;
        }
        text = f->num_texts++;
    }
    memset(&f->texts[text], 0, sizeof(Text));
    f->texts[text].used = f->texts[text].open = 1;
    f->texts[text].begin = f->texts[text].inserted = f->texts[text].early = begin;
    f->texts[text].roots[0] = first_root;
    f->texts[text].roots[1] = second_root;
    return text;
}

static int insert(Forest *f, uint32_t text, uint32_t start, uint32_t length, uint32_t counted) {
    if (reserve_nodes(f, 4) || reserve_edges(f, 4)) {
        f->failed = 1;
        return -1;
    }
    for (int i = 0; i < 2; i++)
        if (f->texts[text].roots[i] != NONE) insert_suffix(f, f->texts[text].roots[i], text, start, length, counted);
    return 0;
}

static int take_out(Forest *f, uint32_t text, uint32_t start, uint32_t length) {
    for (int i = 0; i < 2; i++)
        if (f->texts[text].roots[i] != NONE && remove_suffix(f, f->texts[text].roots[i], text, start, length))
            return -1;
    return 0;
}

/* Inserts the suffixes before `end` for good, and those before `early_end` cut at the early depth. */
static int insert_until(Forest *f, uint32_t text, int64_t end, int64_t early_end) {
    Text *t = &f->texts[text];
    for (; (int64_t)t->inserted < end; t->inserted++) {
        uint32_t left = t->length - t->inserted, length = left < f->depth ? left : f->depth;
        if (insert(f, text, t->inserted, length, t->inserted < t->early ? f->early_depth : 0)) return -1;
    }
    if (t->early < t->inserted) t->early = t->inserted;
    for (; (int64_t)t->early < early_end; t->early++)
        if (insert(f, text, t->early, f->early_depth, 0)) return -1;
    return 0;
}

/* Append to n texts tokens[offsets[i] .. offsets[i + 1]), and insert the suffixes that are long enough (or later). */
int32_t sf_extend(void *forest, int32_t n, const uint32_t *texts, const int32_t *tokens, const int64_t *offsets,
                  int32_t inserts) {
    Forest *f = forest;
    for (int32_t i = 0; i < n; i++) {
        Text *t = &f->texts[texts[i]];
        uint32_t more = (uint32_t)(offsets[i + 1] - offsets[i]);
        if (f->failed) return -1;
        if (t->length + more > t->capacity) {
            uint32_t capacity = t->length + more;
            if (t->length) capacity += capacity / 4 + 16;
            int32_t *grown = realloc(t->tokens, (size_t)capacity * 4);
            if (!grown) return -1;
            f->text_bytes += (int64_t)(capacity - t->capacity) * 4;
            t->tokens = grown;
            t->capacity = capacity;
        }
        memcpy(t->tokens + t->length, tokens + offsets[i], (size_t)more * 4);
        t->length += more;
        int64_t length = t->length;
        if (inserts && insert_until(f, texts[i], length - f->depth + 1, length - f->early_depth + 1)) return -1;
    }
    return 0;
}

/* No token will follow: inserts the suffixes that are shorter than the depth. */
int32_t sf_finish(void *forest, uint32_t text) {
    Forest *f = forest;
    Text *t = &f->texts[text];
    if (f->failed || insert_until(f, text, t->length, 0)) return -1;
    t->open = 0;
    if (t->capacity > t->length && t->length) {
        int32_t *fitted = realloc(t->tokens, (size_t)t->length * 4);
        if (fitted) {
            f->text_bytes -= (int64_t)(t->capacity - t->length) * 4;
            t->tokens = fitted;
            t->capacity = t->length;
        }
    }
    return 0;
}

int32_t sf_remove(void *forest, uint32_t text) {
    Forest *f = forest;
    if (f->failed) return -1;
    const Text *t = &f->texts[text];
    for (uint32_t start = t->begin; start < t->early || start < t->inserted; start++) {
        uint32_t left = t->length - start, length = left < f->depth ? left : f->depth;
        if (take_out(f, text, start, start < t->inserted ? length : f->early_depth)) return -1;
    }
    f->texts[text].used = 0;
    free_text_if_unused(f, text);
    return 0;
}

typedef struct {
    double score;
    int32_t length, match, tree, support;
} Draft;

/* The greedy continuation from `consumed` tokens into the edge to `node`; returns its length. */
static int32_t walk(Forest *f, uint32_t node, uint32_t consumed, int32_t most, double least, int32_t *tokens,
                    double *probabilities, double *score) {
    double probability = 1.0, sum = 0.0;
    int32_t length = 0;
    while (length < most) {
        const Node *n = &f->nodes[node];
        if (consumed == n->length) {
            uint32_t child = best_child(f, node);
            if (child == NONE) break;
            probability *= (double)f->nodes[child].count / (double)f->nodes[node].count;
            if (probability < least) break;
            node = child;
            consumed = 0;
            n = &f->nodes[node];
        }
        tokens[length] = f->texts[n->text].tokens[n->position + consumed];
        probabilities[length++] = probability;
        sum += probability;
        consumed++;
    }
    *score = sum;
    return length;
}

/* Where the last `match` tokens before `end` lead from `node`, and how far into the edge; NONE if they are absent. */
static uint32_t find_match(Forest *f, uint32_t node, const int32_t *end, uint32_t match, uint32_t *consumed) {
    const int32_t *context = end - match;
    for (uint32_t done = 0; done < match; done += *consumed) {
        node = find_child(f, node, context[done]);
        if (node == NONE) return NONE;
        const Node *c = &f->nodes[node];
        const int32_t *edge = f->texts[c->text].tokens + c->position;
        uint32_t limit = c->length < match - done ? c->length : match - done;
        for (*consumed = 1; *consumed < limit && edge[*consumed] == context[done + *consumed];) ++*consumed;
        if (*consumed < limit) return NONE;
    }
    return node;
}

/* The most tokens of a draft after a match; 0 where the match is too long. */
static int32_t allowed_after(const Forest *f, uint32_t match, int32_t cap, double factor, double offset) {
    double budget = match * factor + offset;
    int32_t allowed = budget < cap ? (int32_t)budget : cap, left = (int32_t)(f->depth - match);
    return allowed < left ? allowed : left;
}

/* Drafts for n texts from their own last tokens. Arrays of [n] and, row by row, [n, width]. */
int32_t sf_draft(void *forest, int32_t n, const uint32_t *texts, const int32_t *most, int32_t width, double factor,
                 double offset, double least, int32_t *tokens, double *probabilities, int32_t *lengths,
                 int32_t *matches, int32_t *supports) {
    Forest *f = forest;
    int32_t walk_tokens[MAX_DEPTH];
    double walk_probabilities[MAX_DEPTH];
    if (f->failed) return -1;
    for (int32_t i = 0; i < n; i++) {
        Draft best = {0.0, 0, 0, -1, 0};
        const Text *t = &f->texts[texts[i]];
        int32_t cap = most[i] < width ? most[i] : width;
        uint32_t longest = t->length < f->depth ? t->length : f->depth - 1, peak = 1;
        while (peak < longest && allowed_after(f, peak + 1, cap, factor, offset) >=
                                     allowed_after(f, peak, cap, factor, offset)) peak++;
        for (int tree = 0; tree < 2 && cap > 0; tree++) {
            if (t->roots[tree] == NONE) continue;
            uint32_t nodes[MAX_DEPTH], consumed[MAX_DEPTH], present = 0;
            for (uint32_t match = 1; match <= longest; present = match++) {
                nodes[match] = find_match(f, t->roots[tree], t->tokens + t->length, match, &consumed[match]);
                if (nodes[match] == NONE) break; /* longer ones exist only while shorter suffixes wait for insertion */
            }
            /* Matches that allow the longest drafts come first: after a draft of probable tokens few others can win. */
            uint32_t below = peak < present ? peak : present, above = below + 1;
            while (below || above <= present) {
                int32_t left = below ? allowed_after(f, below, cap, factor, offset) : INT32_MIN;
                int32_t right = above <= present ? allowed_after(f, above, cap, factor, offset) : INT32_MIN;
                uint32_t match = left > right ? below-- : above++;
                int32_t allowed = left > right ? left : right;
                /* Probabilities are 1 at most; of equal scores the first tree wins, then the longest match. */
                if (allowed <= 0 || allowed < best.score) break;
                if (allowed == best.score && (tree != best.tree || (int32_t)match < best.match)) continue;
                double score;
                int32_t length = walk(f, nodes[match], consumed[match], allowed, least, walk_tokens, walk_probabilities,
                                      &score);
                if (length && (score > best.score ||
                               (score == best.score && best.tree == tree && (int32_t)match > best.match))) {
                    best = (Draft){score, length, (int32_t)match, tree, (int32_t)f->nodes[nodes[match]].count};
                    memcpy(tokens + (int64_t)i * width, walk_tokens, (size_t)length * 4);
                    memcpy(probabilities + (int64_t)i * width, walk_probabilities, (size_t)length * 8);
                }
            }
        }
        lengths[i] = best.length;
        matches[i] = best.match;
        supports[i] = best.support;
    }
    return 0;
}

/* The number of sorted edges that are at most x. */
static int32_t bucket(const double *edges, int32_t n, double x) {
    int32_t number = 0;
    while (number < n && edges[number] <= x) number++;
    return number;
}

/* The cells of a row's tokens in a table of `shape`: match, support, probability, position; see calibration.py. */
static void cells_of(int32_t width, int32_t match, int32_t support, const double *probabilities, const int32_t *shape,
                     const double *edges, int64_t *cells) {
    const double *supports = edges + shape[0] - 1, *levels = supports + shape[1] - 1;
    const double *positions = levels + shape[2] - 1;
    int64_t row = (int64_t)bucket(edges, shape[0] - 1, match) * shape[1] + bucket(supports, shape[1] - 1, support);
    for (int32_t j = 0; j < width; j++)
        cells[j] = (row * shape[2] + bucket(levels, shape[2] - 1, probabilities[j])) * shape[3] +
                   bucket(positions, shape[3] - 1, j);
}

/* The least estimate of each draft's tokens up to each position: accept [n, width]; probabilities are [n, stride]. */
void sf_accept(int32_t n, int32_t width, int32_t stride, const int32_t *matches, const int32_t *supports,
               const double *probabilities, const int32_t *shape, const double *edges, const double *estimates,
               double *accept) {
    int64_t cells[MAX_DEPTH];
    for (int32_t i = 0; i < n; i++, accept += width) {
        cells_of(width, matches[i], supports[i], probabilities + (int64_t)i * stride, shape, edges, cells);
        for (int32_t j = 0; j < width; j++) {
            accept[j] = estimates[cells[j]];
            if (j && accept[j - 1] < accept[j]) accept[j] = accept[j - 1];
        }
    }
}

/* Counts each row's first `drafted` tokens, of which the first `right` were right. */
void sf_learn(int32_t n, int32_t stride, const int32_t *matches, const int32_t *supports, const double *probabilities,
              const int32_t *shape, const double *edges, const int64_t *drafted, const int64_t *right,
              double *drafted_counts, double *right_counts) {
    int64_t cells[MAX_DEPTH];
    for (int32_t i = 0; i < n; i++) {
        int32_t width = (int32_t)drafted[i];
        cells_of(width, matches[i], supports[i], probabilities + (int64_t)i * stride, shape, edges, cells);
        for (int32_t j = 0; j < width; j++) {
            drafted_counts[cells[j]] += 1.0;
            if (j < right[i]) right_counts[cells[j]] += 1.0;
        }
    }
}

/* The tokens of each draft to verify: those of at least the row's threshold, and the `free` most probable ones. */
void sf_gate(int32_t n, int32_t width, const double *accept, const int64_t *allowed, const double *thresholds,
             int64_t free, int64_t *lengths, int64_t *filled) {
    for (int32_t i = 0; i < n; i++) {
        const double *row = accept + (int64_t)i * width;
        for (lengths[i] = 0; lengths[i] < allowed[i] && row[lengths[i]] >= thresholds[i];) lengths[i]++;
        filled[i] = 0;
    }
    for (; free > 0; free--) {
        double most = 0.0;
        int32_t best = -1;
        for (int32_t i = 0; i < n; i++) {
            double next = filled[i] < allowed[i] ? accept[(int64_t)i * width + filled[i]] : 0.0;
            if (next > most) most = next, best = i;
        }
        if (best < 0) break;
        filled[best]++;
    }
    for (int32_t i = 0; i < n; i++)
        if (lengths[i] < filled[i]) lengths[i] = filled[i];
}

/* A text's tokens, valid until the forest changes, and how many they are. */
const int32_t *sf_tokens(void *forest, uint32_t text, int64_t *length) {
    Forest *f = forest;
    *length = f->texts[text].length;
    return f->texts[text].tokens;
}

/* How often `pattern` [n] stands in a tree; for tests. */
int64_t sf_count(void *forest, uint32_t root, int32_t n, const int32_t *pattern) {
    Forest *f = forest;
    uint32_t node = root;
    for (int32_t done = 0; done < n;) {
        node = find_child(f, node, pattern[done]);
        if (node == NONE) return 0;
        const Node *c = &f->nodes[node];
        for (uint32_t k = 0; k < c->length && done < n; k++, done++)
            if (f->texts[c->text].tokens[c->position + k] != pattern[done]) return 0;
    }
    return f->nodes[node].count;
}

/* Live nodes (roots among them), and bytes held. */
void sf_size(void *forest, int64_t *size) {
    Forest *f = forest;
    size[0] = f->live_nodes;
    size[1] = (int64_t)sizeof(Forest) + (int64_t)f->node_capacity * sizeof(Node) +
              ((int64_t)f->slot_mask + 1) * 4 + (int64_t)f->text_capacity * sizeof(Text) + f->text_bytes;
}
