/** The same as mayUseQueue, in SQL: whether the patterns in `parameter` allow the queue in `column`. Null: all. */
export function visibleSql(column: string, parameter: string): string {
  return `(${parameter}::text[] IS NULL OR EXISTS (SELECT FROM unnest(${parameter}::text[]) allowed(pattern)
    WHERE CASE WHEN right(pattern, 1) = '*' THEN starts_with(${column}, left(pattern, -1)) ELSE ${column} = pattern END))`
}
