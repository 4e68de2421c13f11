export * from './names.js'
export * from './operations.js'
export * from './petitions.js'
export * from './problem.js'
